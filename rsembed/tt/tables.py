"""The tables of one module: parameters, lookup, gradients and fused update; both published classes build on it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rsembed.bags import Bags, is_traced
from rsembed.checks import NonNegativeInt, dtype_among, validated
from rsembed.fingerprint import Fingerprint, identity
from rsembed.kernels import api as kernels
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers import OptimizerSpec, Slots
from rsembed.row_gradients import check_gradient
from rsembed.tt.chain import AnyCores, Cores, check_implementation
from rsembed.tt.checks import CORE_DTYPES, check_numbers, check_options
from rsembed.tt.cores import check_cores, full_weight, rows_of
from rsembed.tt.fused import FusedParam, FusedState, OptimType, init_core_slots, member_of, rule_of, step_cores
from rsembed.tt.hot_rows import CacheReport, HotRows, on_host
from rsembed.tt.initial_cores import init_cores
from rsembed.tt.lookups import Lookups, gains_of_entries, lookups_of, with_room
from rsembed.tt.meshes import Split, on_every_device, shared_rows
from rsembed.tt.saved_state import check_whole, load_saved_state, saved_state
from rsembed.tt.spec import TTSpec
from rsembed.tt.table_bags import read_bags


class TTGradients(NamedTuple):
    """Gradients that `backward` returns with `sparse=False`, and those of weights with `sparse=True`, too.

    Attributes:
      cores: in the structure of `core_groups`: per group of tables, one array per core; empty with `sparse=True`.
      cached_rows: per group those of the cached rows; empty without a cache, and with `sparse=True`.
      per_sample_weights: of the weights, None without.
    """

    cores: tuple[tuple[Array, ...], ...]
    cached_rows: tuple[Array, ...]
    per_sample_weights: Float[Array, " nnz"] | None


class TTTables(nnx.Module):
    """State and behaviour that both modules share; they add the published constructor and the shape of the output.

    Tables with equal column factors and ranks form a group, whose cores stand one behind the other along their first
    axis: one lookup serves the group, whatever the tables' sizes.

    Attributes:
      specs: one per table.
      groups: tables of every group.
      core_groups: per group, one variable `[sum of p_t over its tables, R_{t-1} * q_t * R_t]` per core.
      learning_rate: of the fused update; a variable, so changing it compiles nothing.
    """

    @validated
    def __init__(
        self,
        specs: Sequence[TTSpec],
        *,
        sparse: bool = True,
        optimizer: OptimType | str = OptimType.SGD,
        learning_rate: float = 0.1,
        eps: float = 1e-10,
        weight_dist: str = "normal",
        dtype: Any = jnp.float32,
        mode: str = "sum",
        padding_idx: int | None = None,
        bounds_check: str = "raise",
        include_last_offset: bool | None = None,
        implementation: str | None = None,
        use_cache: bool = False,
        cache_size: NonNegativeInt = 0,
        hashtbl_size: NonNegativeInt = 0,
        max_spilled_rows: NonNegativeInt | None = None,
        populate_every: NonNegativeInt = 0,
        halve_counts_every: NonNegativeInt = 0,
        rngs: nnx.Rngs | None = None,
    ):
        num_rows = min(spec.num_embeddings for spec in specs)
        dtype = jnp.dtype(dtype_among(CORE_DTYPES, dtype, "dtype"))
        check_implementation(implementation)
        check_options(num_rows, mode=mode, bounds_check=bounds_check, padding_idx=padding_idx)
        check_numbers(learning_rate=learning_rate, eps=eps)
        by_shape: dict[Any, list[int]] = {}
        for k, spec in enumerate(specs):
            by_shape.setdefault((spec.tt_q_shapes, spec.tt_ranks), []).append(k)
        rule, kind = rule_of(optimizer, eps), FusedParam if sparse else nnx.Param
        self.specs = nnx.static(tuple(specs))
        self.groups = nnx.static(tuple(map(tuple, by_shape.values())))
        self.rule: OptimizerSpec = nnx.static(rule)
        self.sparse, self.mode, self.padding_idx = sparse, mode, padding_idx
        self.optimizer, self.eps = member_of(optimizer), eps
        self.bounds_check, self.include_last_offset = bounds_check, include_last_offset
        self.implementation, self.weight_dist, self.dtype = implementation, weight_dist, dtype
        self.populate_every, self.halve_counts_every = populate_every, halve_counts_every
        self.deterministic = False
        cores, slots = self._draw(weight_dist, (rngs or nnx.Rngs(0)).params())
        self.core_groups = nnx.List([nnx.List([kind(core) for core in group]) for group in cores])
        self.slots = nnx.List([FusedState(own) for own in slots])
        self.learning_rate = FusedState(jnp.asarray(learning_rate, jnp.float32))
        self.step = FusedState(jnp.zeros((), jnp.int32))
        self.calls = FusedState(np.zeros(2, np.int32))
        self.caches = nnx.List(
            [
                HotRows(
                    sum(self.specs[k].num_embeddings for k in group),
                    self.specs[group[0]].embedding_dim,
                    rule=rule,
                    kind=kind,
                    cache_size=cache_size,
                    hashtbl_size=hashtbl_size,
                    max_spilled_rows=max_spilled_rows,
                    is_stepped_here=sparse,
                )
                for group in (self.groups if use_cache else ())
            ]
        )

    def _draw(self, weight_dist: str, key: Array) -> tuple[list[Cores], list[tuple[Slots, ...]]]:
        """Initial cores of every group, and the state that they start with."""
        keys = list(jax.random.split(key, len(self.specs))) if len(self.specs) > 1 else [key]
        tables = [init_cores(k, s, weight_dist, dtype=self.dtype) for k, s in zip(keys, self.specs, strict=True)]
        cores = [tuple(map(jnp.concatenate, zip(*(tables[k] for k in group), strict=True))) for group in self.groups]
        return cores, [init_core_slots(self.rule, group) if self.sparse else () for group in cores]

    def _set_cores(self, cores: Sequence[Cores], slots: Sequence[tuple[Slots, ...]]) -> None:
        for variables, group in zip(self.core_groups, cores, strict=True):
            for variable, core in zip(variables, group, strict=True):
                nnx.Variable.set_value(variable, core)
        for state, own in zip(self.slots, slots, strict=True):
            state.set_value(own)

    def reset_parameters(self, weight_dist: str | None = None, *, rngs: nnx.Rngs | None = None) -> None:
        """Draws all cores anew, by default as the constructor did; forgets optimizer state, counts and cached rows."""
        self._set_cores(*self._draw(weight_dist or self.weight_dist, (rngs or nnx.Rngs(0)).params()))
        for cache in self.caches:
            cache.reset()
        self.step.set_value(jnp.zeros((), jnp.int32))

    @validated
    def set_learning_rate(self, lr: float | Float[Array, ""]) -> None:
        """Learning rate of the fused updates from now on. Raises: ValueError: it is negative or not finite."""
        check_numbers(learning_rate=lr)
        self.learning_rate.set_value(jnp.asarray(lr, jnp.float32))

    def cores_of(self, table: int = 0) -> tuple[Array, ...]:
        """The cores of one table."""
        g, cuts = self._cuts_of(table)
        return tuple(core.get_value()[cut] for core, cut in zip(self.core_groups[g], cuts, strict=True))

    def set_cores(self, cores: AnyCores, table: int = 0) -> None:
        """Puts cores in place of those of a table, such as those of `from_dense`.

        The optimizer state of the old cores and the cached rows of the table are forgotten; read counts stay, and so
        does the number of steps where there are other tables.

        Raises: ValueError: their shapes do not fit, or a number is not finite.
        """
        g, cuts = self._cuts_of(table)
        new = tuple(core.astype(self.dtype) for core in check_cores(self.specs[table], cores))
        for t, core in enumerate(new):
            if not is_traced(core) and not bool(jnp.isfinite(core).all()):
                raise ValueError(f"core {t} for table {table} has a number that is not finite; clean the cores first.")
        values, slots = list(self._core_values()), [own.get_value() for own in self.slots]

        def put(old: Any, own: Any) -> Any:
            pairs = zip(old, own, cuts, strict=True)
            return tuple(jax.tree.map(lambda x, y, cut=cut: x.at[cut].set(y), *pair) for *pair, cut in pairs)

        values[g] = put(values[g], new)
        if self.sparse:
            slots[g] = put(slots[g], init_core_slots(self.rule, new))
        self._set_cores(values, slots)
        if len(self.specs) == 1:
            self.step.set_value(jnp.zeros((), jnp.int32))
        if self.caches:
            first = sum(spec.num_embeddings for spec in self._place_of(table)[1])
            self.caches[g].forget(first, first + self.specs[table].num_embeddings)

    def _cuts_of(self, table: int) -> tuple[int, list[slice]]:
        """A table's group, and where its part of each core begins and ends there."""
        g, before = self._place_of(table)
        first = [sum(spec.tt_p_shapes[t] for spec in before) for t in range(self.specs[table].num_cores)]
        return g, [slice(start, start + p) for start, p in zip(first, self.specs[table].tt_p_shapes, strict=True)]

    def _place_of(self, table: int) -> tuple[int, list[TTSpec]]:
        """A table's group, and the tables that stand before it there."""
        if not 0 <= table < len(self.specs):
            raise ValueError(f"there is no table {table}, only {len(self.specs)} tables.")
        ((g, group),) = [(g, group) for g, group in enumerate(self.groups) if table in group]
        return g, [self.specs[k] for k in group[: group.index(table)]]

    def get_params(self) -> list[Array]:
        """The values of all cores, group after group, then those of cached rows; changes nothing."""
        cores = [core.get_value() for group in self.core_groups for core in group]
        return cores + [cache.rows.get_value() for cache in self.caches]

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.specs)

    @property
    def num_embeddings(self) -> int | list[int]:
        """Rows: of each table, or one number where all have as many; so do the next ones."""
        return _of_all([spec.num_embeddings for spec in self.specs])

    @property
    def embedding_dim(self) -> int | list[int]:
        """Length of a row."""
        return _of_all([spec.embedding_dim for spec in self.specs])

    @property
    def tt_p_shapes(self) -> list[Any]:
        """Row factors."""
        return _of_all([list(spec.tt_p_shapes) for spec in self.specs])

    @property
    def tt_q_shapes(self) -> list[Any]:
        """Column factors."""
        return _of_all([list(spec.tt_q_shapes) for spec in self.specs])

    @property
    def tt_ranks(self) -> list[Any]:
        """All ranks, from 1 to 1."""
        return _of_all([list(spec.ranks) for spec in self.specs])

    @property
    def tt_ndim(self) -> int | list[int]:
        """Number of cores."""
        return _of_all([spec.num_cores for spec in self.specs])

    @property
    def tt_cores(self) -> list[nnx.Variable]:
        """The cores' variables, group after group; tables of a group stand one behind the other."""
        return [core for group in self.core_groups for core in group]

    @property
    def optimizer_state(self) -> list[Array]:
        """The state of the fused update, one array per core and slot."""
        return [leaf for own in self.slots for leaf in jax.tree.leaves(own.get_value())]

    @property
    def use_cache(self) -> bool:
        """Whether rows may be cached."""
        return bool(self.caches)

    @property
    def cache_weight(self) -> Any:
        """The cached rows `[rows, dim]`, in a list where there are several groups of tables; None without a cache."""
        return _of_all([cache.rows.get_value() for cache in self.caches]) if self.caches else None

    def table_weight(self, table: int = 0) -> Float[Array, "vocab dim"]:
        """One table, expanded, cached rows included."""
        weight = full_weight(self.specs[table], self.cores_of(table))
        if not self.caches:
            return weight
        g, before = self._place_of(table)
        ids, rows = self.caches[g].learned()
        ids = ids - sum(spec.num_embeddings for spec in before)
        is_ours = (ids >= 0) & (ids < weight.shape[0])
        if not is_ours.any():
            return weight
        ids, rows = ids[is_ours], rows[is_ours]
        return weight.at[ids].set(jnp.where(True, rows, weight[ids]))  # `where` brings rows to the mesh of the weight

    def update_cache(self, indices: Any, offsets: Any = None) -> None:
        """Counts reads without a lookup. A lookup counts as well, except inside `jit` and after `eval()`.

        Args:
          indices: ids as for a lookup; of one table also flat ids without offsets.
          offsets: as for a lookup.

        Raises: RuntimeError: inside `jit`.
        """
        if isinstance(indices, jax.Array):
            indices = on_host(indices)
        if offsets is None and len(self.specs) == 1 and not isinstance(indices, Bags):
            flat = np.asarray(indices) if all(np.ndim(own) == 0 for own in indices) else None
            indices = indices if flat is None else flat.reshape(-1, 1)
        self._count(self._look_up(self._checked_bags(indices, offsets, None))[0])

    def cache_populate(self) -> None:
        """Keeps the most read rows from now on; no output changes. Warns where no read was counted. See `hot_rows`.

        Raises: RuntimeError: inside `jit`.
        """
        if self.caches and not any(cache.report().lookups for cache in self.caches):
            warnings.warn(
                "cache_populate: nothing was counted, so nothing is cached; lookups inside jit are not counted: call "
                "update_cache(ids) beside compiled steps.",
                stacklevel=2,
            )
        for cache, cores, group in zip(self.caches, self._core_values(), self.groups, strict=False):
            cache.populate(functools.partial(_rows_by_number, [self.specs[k] for k in group], cores))
        if self._is_turn(1, self.halve_counts_every):
            for cache in self.caches:
                cache.halve_counts()

    def reset_cache(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Forgets counts and cached rows; returns, per group, the ids and rows that were learned."""
        learned = [cache.learned() for cache in self.caches]
        for cache in self.caches:
            cache.reset()
        return learned

    def cache_reports(self) -> list[CacheReport]:
        """Contents, hits and evictions, per group of tables."""
        return [cache.report() for cache in self.caches]

    def state_dict(self) -> dict[str, np.ndarray]:
        """All there is to save, as a flat dictionary of NumPy arrays: cores, optimizer state, cached rows, counts.

        It is `nnx.state` by names, and what kind of module it belongs to. `np.savez`, `rsembed.checkpoint` and Orbax
        take it.
        """
        return saved_state(self, self._fingerprint())

    def _fingerprint(self) -> Fingerprint:
        """Fingerprint of the arrays of a state."""
        tables = {str(k): dataclasses.asdict(spec) for k, spec in enumerate(self.specs)}
        caches = {str(g): cache.sizes() for g, cache in enumerate(self.caches)}
        rule = identity(self.rule) if self.sparse else "outside"
        return Fingerprint.of({"tables": tables, "dtype": str(self.dtype), "optimizer": rule, "caches": caches})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on, bit by bit, where the module of a `state_dict` stood; both were made with the same arguments.

        Raises: ValueError: the names, the shape or dtype of an array, the tables, the optimizer or the sizes of the
          cache are those of another module; then nothing changes.
        """
        load_saved_state(self, state, self._fingerprint())

    def lookup(self, indices: Any, offsets: Any, per_sample_weights: Any) -> list[Float[Array, "batch dim"]]:
        """Pooled rows of every table."""
        batch, weights = self._look_up(self._checked_bags(indices, offsets, per_sample_weights))
        split = Split.of(indices)
        return self._pooled(split, self._with_places(batch), self._core_values(), self._cached_values(), weights)

    def lookup_vjp(
        self, indices: Any, offsets: Any, per_sample_weights: Any
    ) -> tuple[list[Float[Array, "batch dim"]], Callable[[Sequence[Any]], TTGradients | None]]:
        """Pooled rows of every table, and the function that takes their gradients."""
        bags = self._checked_bags(indices, offsets, per_sample_weights)
        batch, weights = self._look_up(bags)
        batch = self._with_places(batch)
        lookup = functools.partial(self._pooled, Split.of(indices), batch)
        cores, cached = self._core_values(), self._cached_values()
        if self.sparse:  # the cached rows are stepped where they lie, without a gradient of them all
            outputs, pull = jax.vjp(lambda cores, weights: lookup(cores, cached, weights), cores, weights)
        else:
            outputs, pull = jax.vjp(lookup, cores, cached, weights)
        shapes = [output.shape for output in outputs]
        directories, is_spent = [cache.directory() for cache in self.caches], False

        def backward(d_outputs: Sequence[Any]) -> TTGradients | None:
            nonlocal is_spent
            if not all(cache.holds(directory) for cache, directory in zip(self.caches, directories, strict=True)):
                raise RuntimeError("the cache was populated or reset after this lookup; look the batch up again.")
            if is_spent:
                raise RuntimeError("this backward has already stepped the cores; look the batch up again.")
            for table, (d_output, shape) in enumerate(zip(d_outputs, shapes, strict=True)):
                check_gradient(d_output, f"d_output of table {table}")
                if np.shape(d_output) != shape:
                    raise ValueError(f"d_output of table {table} has shape {np.shape(d_output)}, its output {shape}.")
            d_outputs = [jnp.asarray(on_every_device(d), jnp.float32) for d in d_outputs]
            if not self.sparse:
                d_cores, d_cached, d_weights = pull(d_outputs)
                return TTGradients(d_cores, d_cached, None if d_weights is None else d_weights[: bags.ids.shape[0]])
            is_spent = True
            d_cores, d_weights = pull(d_outputs)
            self._update(d_cores, batch, weights, d_outputs)
            return None if d_weights is None else TTGradients((), (), d_weights[: bags.ids.shape[0]])

        return outputs, backward

    def _core_values(self) -> tuple[Cores, ...]:
        cores = tuple(tuple(core.get_value() for core in group) for group in self.core_groups)
        check_whole(self, cores)
        return on_every_device(cores)

    def _cached_values(self) -> tuple[Array, ...]:
        return on_every_device(tuple(cache.rows.get_value() for cache in self.caches))

    def _checked_bags(self, *given: Any) -> Bags:
        ignores, last = self.bounds_check == "ignore", self.include_last_offset
        name = type(self).__name__
        return read_bags(self.specs, *given, name=name, include_last_offset=last, allow_out_of_range=ignores)

    def _look_up(self, bags: Bags) -> tuple[list[Lookups], Float[Array, " nnz"] | None]:
        """Reads of a batch in every group, and its weights."""
        bags = with_room(bags)
        weights = None if bags.weights is None else jnp.asarray(bags.weights, jnp.float32)
        return lookups_of(bags, self.specs, self.groups, self.padding_idx), weights

    def _count(self, batch: list[Lookups]) -> None:
        for cache, asked in zip(self.caches, batch, strict=False):
            ids, bags = on_host((asked.ids, asked.bags))
            cache.count(ids[bags != NO_ROW])

    def _is_turn(self, which: int, every: int) -> bool:
        """Whether one more lookup (0) or populate (1) completes a round of `every`."""
        if not every:
            return False
        calls = np.array(self.calls.get_value())
        calls[which] = (calls[which] + 1) % every
        self.calls.set_value(calls)
        return bool(calls[which] == 0)

    def _with_places(self, batch: list[Lookups]) -> list[Lookups]:
        """The batch, and where its cached rows are; first it is counted, and the cache populated when it is time."""
        if not self.caches:
            return batch
        is_inside = any(isinstance(asked.bags, jax.core.Tracer) for asked in batch)
        if is_inside and self.populate_every and not self.deterministic:
            raise RuntimeError(
                f"populate_every={self.populate_every} counts lookups on the host, which inside jit nobody does; leave "
                "it out, and call update_cache(ids) and cache_populate() between compiled steps; or call eval()."
            )
        if not is_inside and not self.deterministic:
            self._count(batch)
            if self._is_turn(0, self.populate_every):
                self.cache_populate()
        return [
            asked._replace(places=jnp.where(asked.bags == NO_ROW, NO_ROW, cache.find(jnp.asarray(asked.ids))))
            for asked, cache in zip(batch, self.caches, strict=True)
        ]

    def _pooled(
        self,
        split: Split | None,
        batch: list[Lookups],
        cores: tuple[Cores, ...],
        cached: tuple[Array, ...],
        weights: Array | None,
    ) -> list[Array]:
        """Rows of every table: cached ones where there are such, chains of products for the others."""
        by_table: dict[int, Array] = {}
        for g, (group, asked) in enumerate(zip(self.groups, batch, strict=True)):
            gains = gains_of_entries(asked.bags, asked.num_bags, weights, self.mode)  # type: ignore[arg-type]
            pooled = shared_rows(
                split,
                cores[g],
                asked.digits,
                asked.bags if asked.places is None else jnp.where(asked.places == NO_ROW, asked.bags, NO_ROW),
                gains,
                slice_shapes=self.specs[group[0]].slice_shapes,
                num_bags=asked.num_bags,
                implementation=self.implementation,
            )
            if asked.places is not None:
                pooled = pooled + kernels.lookup(cached[g], [asked.cached(gains)])[0]
            by_table.update(zip(group, pooled.reshape(len(group), -1, pooled.shape[1]), strict=True))
        return [by_table[k] for k in range(len(self.specs))]

    def _update(self, d_cores: Any, batch: list[Lookups], weights: Array | None, d_outputs: Sequence[Array]) -> None:
        """One optimizer step of all cores, and of the cached rows that were read."""
        rate = self.learning_rate.get_value()
        hyper = dataclasses.replace(self.rule, learning_rate=lambda: rate).get_hyperparameters(self.step.get_value())
        slots = [own.get_value() for own in self.slots]
        pairs = zip(self._core_values(), slots, d_cores, strict=True)
        stepped = [step_cores(self.rule, *group, hyper) for group in pairs]
        self._set_cores([cores for cores, _ in stepped], [kept for _, kept in stepped])
        for cache, group, asked in zip(self.caches, self.groups, batch, strict=False):
            gains = gains_of_entries(asked.bags, asked.num_bags, weights, self.mode)  # type: ignore[arg-type]
            cache.step(asked.cached(gains), jnp.concatenate([d_outputs[k] for k in group]), hyper)
        self.step.set_value(self.step.get_value() + 1)


def _of_all(values: list[Any]) -> Any:
    """One value, if it is the same for all tables, or one for each."""
    if len(values) > 1 and (isinstance(values[0], Array) or any(value != values[0] for value in values)):
        return values
    return values[0]


def _rows_by_number(specs: Sequence[TTSpec], cores: Cores, ids: np.ndarray) -> np.ndarray:
    """Rows from the cores of a group, whose ids count on from table to table."""
    # A power of two, so that few programs serve all numbers of ids.
    padded = np.zeros(1 << max(5, (ids.size - 1).bit_length()), np.int64)
    padded[: ids.size] = ids
    ends = np.cumsum([spec.num_embeddings for spec in specs])
    table = np.searchsorted(ends, padded, side="right")
    found = rows_of(specs, cores, padded - np.r_[0, ends[:-1]][table], table, implementation="chunked")
    return np.asarray(found)[: ids.size]
