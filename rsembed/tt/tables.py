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

from rsembed.bags import Bags
from rsembed.fingerprint import Fingerprint, identity
from rsembed.kernels import api as kernels
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.optimizers import OptimizerSpec
from rsembed.tt.chain import pooled_rows
from rsembed.tt.checks import check_learning_rate, check_numbers, check_options
from rsembed.tt.cores import digits_of, full_weight, gains_of_entries, with_room
from rsembed.tt.fused import OptimType, rule_of
from rsembed.tt.hot_rows import CacheReport, make_hot_rows
from rsembed.tt.initial_cores import init_cores
from rsembed.tt.inputs import Entries, check_bounds, entries_of, table_bags
from rsembed.tt.meshes import as_on_automatic_axes, on_every_device
from rsembed.tt.saved_state import load_saved_state, saved_state
from rsembed.tt.spec import TTSpec


class FusedParam(nnx.Variable):
    """Cores that only the fused update trains: no `nnx.Param`, so neither `nnx.grad` nor optax sees them."""


class FusedState(nnx.Variable):
    """Optimizer state, step counter and learning rate of the fused update."""


class TTGradients(NamedTuple):
    """What `backward` returns with `sparse=False`.

    Attributes:
      cores: in the structure of `core_groups`: per group of tables, one array per core.
      cached_rows: per group those of the cached rows; empty without a cache.
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
        cache_size: int = 0,
        hashtbl_size: int = 0,
        max_spilled_rows: int | None = None,
        populate_every: int = 0,
        halve_counts_every: int = 0,
        rngs: nnx.Rngs | None = None,
    ):
        check_options(specs, mode=mode, bounds_check=bounds_check, dtype=jnp.dtype(dtype), padding_idx=padding_idx)
        check_learning_rate(learning_rate)
        check_numbers(
            eps=eps,
            cache_size=cache_size,
            hashtbl_size=hashtbl_size,
            max_spilled_rows=max_spilled_rows or 0,
            populate_every=populate_every,
            halve_counts_every=halve_counts_every,
        )
        if max_spilled_rows and not sparse:
            raise ValueError(
                f"max_spilled_rows={max_spilled_rows} needs sparse=True: with sparse=False an optimizer outside knows "
                "rows by their place, so trained rows must keep theirs; leave it out."
            )
        by_shape: dict[Any, list[int]] = {}
        for k, spec in enumerate(specs):
            by_shape.setdefault((spec.tt_q_shapes, spec.tt_ranks), []).append(k)
        rule = rule_of(optimizer, eps)
        self.specs = nnx.static(tuple(specs))
        self.groups = nnx.static(tuple(tuple(tables) for tables in by_shape.values()))
        self.rule: OptimizerSpec = nnx.static(rule)
        self.sparse, self.mode, self.padding_idx = sparse, mode, padding_idx
        self.bounds_check, self.include_last_offset = bounds_check, include_last_offset
        self.implementation, self.weight_dist, self.dtype = implementation, weight_dist, jnp.dtype(dtype)
        kind = FusedParam if sparse else nnx.Param
        cores = self._draw_cores(weight_dist, (rngs or nnx.Rngs(0)).params())
        self.core_groups = nnx.List([nnx.List([kind(core) for core in group]) for group in cores])
        self.learning_rate = FusedState(jnp.asarray(learning_rate, jnp.float32))
        self.step = FusedState(jnp.zeros((), jnp.int32))
        slots = [tuple(rule.init_slots(core) for core in group) if sparse else () for group in cores]
        self.slots = nnx.List([FusedState(group) for group in slots])
        self.populate_every, self.halve_counts_every = populate_every, halve_counts_every
        self.deterministic = False
        max_spilled_rows = max_spilled_rows if sparse else 0
        groups = [[self.specs[k] for k in group] for group in self.groups] if use_cache else []
        self.caches = nnx.List(
            [make_hot_rows(group, rule, kind, cache_size, hashtbl_size, max_spilled_rows) for group in groups]
        )
        self.calls = FusedState(np.zeros(2, np.int32))

    def reset_parameters(self, weight_dist: str | None = None, *, rngs: nnx.Rngs) -> None:
        """Draws all cores anew, by default as the constructor did; forgets optimizer state, counts and cached rows."""
        cores = self._draw_cores(weight_dist or self.weight_dist, rngs.params())
        for variables, group in zip(self.core_groups, cores, strict=True):
            for variable, core in zip(variables, group, strict=True):
                variable.set_value(core)
        for slots, group in zip(self.slots, cores, strict=True):
            slots.set_value(tuple(self.rule.init_slots(core) for core in group) if self.sparse else ())
        for cache in self.caches:
            cache.reset()
        self.step.set_value(jnp.zeros((), jnp.int32))

    def set_learning_rate(self, learning_rate: Any) -> None:
        """Learning rate of the fused updates from now on. Raises: ValueError: it is negative or not finite."""
        check_learning_rate(learning_rate)
        self.learning_rate.set_value(jnp.asarray(learning_rate, jnp.float32))

    def cores_of(self, table: int = 0) -> tuple[Array, ...]:
        """The cores of one table."""
        ((g, group),) = [(g, group) for g, group in enumerate(self.groups) if table in group]
        before, spec = group[: group.index(table)], self.specs[table]
        cut = []
        for t, core in enumerate(self.core_groups[g]):
            start = sum(self.specs[k].tt_p_shapes[t] for k in before)
            cut.append(core.get_value()[start : start + spec.tt_p_shapes[t]])
        return tuple(cut)

    def get_params(self) -> list[Array]:
        """The values of all cores, group after group; changes nothing."""
        return [core.get_value() for group in self.core_groups for core in group]

    def table_weight(self, table: int = 0) -> Float[Array, "vocab dim"]:
        """One table, expanded, cached rows included."""
        weight, num_rows = full_weight(self.specs[table], self.cores_of(table)), self.specs[table].num_embeddings
        for group, cache in zip(self.groups, self.caches, strict=False):
            if table in group:
                first = sum(self.specs[k].num_embeddings for k in group[: group.index(table)])
                ids, rows = cache.learned()
                is_ours = (ids >= first) & (ids < first + num_rows)
                weight = _with_rows(weight, ids[is_ours] - first, rows[is_ours])
        return weight

    def update_cache(self, indices: Any, offsets: Any = None) -> None:
        """Counts reads without a lookup. A lookup counts as well, except inside `jit` and after `eval()`."""
        self._count(self._entries(with_room(self._checked_bags(indices, offsets, None))))

    def cache_populate(self) -> None:
        """Keeps the most read rows from now on, outside `jit`; no output changes. See `hot_rows`."""
        for g, cache in enumerate(self.caches):
            cache.populate(functools.partial(self._rows_of_group, g))
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
        """What the arrays of a state mean."""
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
        bags = with_room(self._checked_bags(indices, offsets, per_sample_weights))
        entries = self._entries(bags)
        self._count_and_populate(entries)
        places = self._places(entries)
        return self._pooled(bags, entries, places, self._core_values(), self._cached_values(), bags.weights)

    def lookup_vjp(
        self, indices: Any, offsets: Any, per_sample_weights: Any
    ) -> tuple[list[Float[Array, "batch dim"]], Callable[[Sequence[Any]], TTGradients | None]]:
        """Pooled rows of every table, and the function that takes their gradients."""
        given = self._checked_bags(indices, offsets, per_sample_weights)
        bags = with_room(given)
        entries = self._entries(bags)
        self._count_and_populate(entries)
        places = self._places(entries)
        weights = None if bags.weights is None else jnp.asarray(bags.weights, jnp.float32)
        lookup, cores = functools.partial(self._pooled, bags, entries, places), self._core_values()
        if self.sparse:  # the cached rows are stepped where they lie, without a gradient of them all
            outputs, pull = jax.vjp(lambda cores: lookup(cores, self._cached_values(), weights), cores)
        else:
            outputs, pull = jax.vjp(lookup, cores, self._cached_values(), weights)
        directories, num_updates = [cache.directory() for cache in self.caches], 0

        def backward(d_outputs: Sequence[Any]) -> TTGradients | None:
            if not all(cache.holds(directory) for cache, directory in zip(self.caches, directories, strict=True)):
                raise RuntimeError("the cache was populated or reset after this lookup; look the batch up again.")
            d_outputs = [jnp.asarray(on_every_device(d), jnp.float32) for d in d_outputs]
            if not self.sparse:
                d_cores, d_rows, d_weights = pull(d_outputs)
                return TTGradients(d_cores, d_rows, None if d_weights is None else d_weights[: given.ids.shape[0]])
            nonlocal num_updates
            num_updates += 1
            if num_updates > 1:
                raise RuntimeError("this backward has already stepped the cores; look the batch up again.")
            pairs = zip(entries, places, strict=False)
            segments = [self._segment(bags, found, where, weights) for found, where in pairs]
            self._update(pull(d_outputs)[0], segments, d_outputs)
            return None

        return outputs, backward

    def _draw_cores(self, weight_dist: str, key: Array) -> list[list[Array]]:
        keys = list(jax.random.split(key, len(self.specs))) if len(self.specs) > 1 else [key]
        tables = [init_cores(k, s, weight_dist, dtype=self.dtype) for k, s in zip(keys, self.specs, strict=True)]
        return [
            [
                jnp.concatenate(cores) if len(cores) > 1 else cores[0]
                for cores in zip(*(tables[k] for k in group), strict=True)
            ]
            for group in self.groups
        ]

    def _core_values(self) -> tuple[tuple[Array, ...], ...]:
        return on_every_device(tuple(tuple(core.get_value() for core in group) for group in self.core_groups))

    def _cached_values(self) -> tuple[Array, ...]:
        return on_every_device(tuple(cache.rows.get_value() for cache in self.caches))

    def _rows_of_group(self, g: int, ids: np.ndarray) -> np.ndarray:
        """Rows from the cores; ids count on from table to table of the group."""
        specs = [self.specs[k] for k in self.groups[g]]
        # A power of two, so that few programs serve all numbers of ids.
        padded = np.zeros(1 << max(5, (ids.size - 1).bit_length()), np.int64)
        padded[: ids.size] = ids
        ends = np.cumsum([spec.num_embeddings for spec in specs])
        table = np.searchsorted(ends, padded, side="right")
        digits, _ = digits_of(specs, padded - np.r_[0, ends[:-1]][table], table)
        rows = pooled_rows(
            self._core_values()[g],
            digits,
            jnp.arange(padded.size, dtype=jnp.int32),
            jnp.ones(padded.size),
            slice_shapes=specs[0].slice_shapes,
            num_bags=padded.size,
            implementation="chunked",
        )
        return np.asarray(rows)[: ids.size]

    def _count(self, entries: list[Entries]) -> None:
        for cache, found in zip(self.caches, entries, strict=False):
            cache.count(np.asarray(found.ids)[np.asarray(found.bags) != NO_ROW])

    def _count_and_populate(self, entries: list[Entries]) -> None:
        if self.deterministic or not self.caches or any(isinstance(e.bags, jax.core.Tracer) for e in entries):
            return
        self._count(entries)
        if self._is_turn(0, self.populate_every):
            self.cache_populate()

    def _is_turn(self, which: int, every: int) -> bool:
        """Whether one more lookup (0) or populate (1) completes a round of `every`."""
        if not every:
            return False
        calls = np.array(self.calls.get_value())
        calls[which] = (calls[which] + 1) % every
        self.calls.set_value(calls)
        return bool(calls[which] == 0)

    def _places(self, entries: list[Entries]) -> list[Array]:
        """Where the cached rows of a batch are, `NO_ROW` for all others."""
        pairs = zip(self.caches, entries, strict=False)
        return [jnp.where(found.bags == NO_ROW, NO_ROW, cache.find(found.ids)) for cache, found in pairs]

    def _checked_bags(self, indices: Any, offsets: Any, per_sample_weights: Any) -> Bags:
        bags = table_bags(
            indices,
            offsets,
            per_sample_weights,
            num_tables=len(self.specs),
            include_last_offset=self.include_last_offset,
        )
        ignores = self.bounds_check == "ignore"
        num_outside = check_bounds(bags, self.specs, type(self).__name__, allow_out_of_range=ignores)
        if num_outside:
            warnings.warn(f"{num_outside} ids outside their table contribute nothing.", stacklevel=4)
        return bags

    def _entries(self, bags: Bags) -> list[Entries]:
        return entries_of(bags, self.specs, self.groups, self.padding_idx)

    def _pooled(
        self, bags: Bags, entries: list[Entries], places: list[Array], cores: Any, cached: Any, weights: Any
    ) -> list[Array]:
        """Per table `[batch, dim]`, float32: cached rows where there are such, chains of products for the others."""
        by_table: dict[int, Array] = {}
        for g, (group, found) in enumerate(zip(self.groups, entries, strict=True)):
            gains = gains_of_entries(found.bags, found.num_bags, weights, self.mode)  # type: ignore[arg-type]
            pooled = pooled_rows(
                cores[g],
                found.digits,
                jnp.where(places[g] == NO_ROW, found.bags, NO_ROW) if self.caches else found.bags,
                gains,
                slice_shapes=self.specs[group[0]].slice_shapes,
                num_bags=found.num_bags,
                implementation=self.implementation,
            )
            if self.caches:
                segment = self._segment(bags, found, places[g], weights)
                (vectors,) = kernels.lookup(cached[g], [segment])
                pooled = pooled + self._of_group(g, vectors).reshape(pooled.shape)
            by_table.update(zip(group, pooled.reshape(len(group), -1, pooled.shape[1]), strict=True))
        return [by_table[k] for k in range(len(self.specs))]

    def _segment(self, bags: Bags, found: Entries, places: Array, weights: Any = None) -> Segment:
        """The cached rows of a batch, in the bags of all tables."""
        gains = gains_of_entries(found.bags, found.num_bags, weights, self.mode)  # type: ignore[arg-type]
        return Segment(places, jnp.asarray(bags.offsets), gains)

    def _of_group(self, g: int, vectors: Array) -> Array:
        """Of the vectors of all bags those of one group's tables."""
        by_table = vectors.reshape(len(self.specs), -1, vectors.shape[1])
        return by_table if len(self.groups) == 1 else by_table[np.asarray(self.groups[g])]

    def _update(self, d_cores: Any, segments: list[Segment], d_outputs: Sequence[Array]) -> None:
        """One optimizer step of all cores, and of the cached rows that were read."""
        rate = self.learning_rate.get_value()
        hyper = dataclasses.replace(self.rule, learning_rate=lambda: rate).get_hyperparameters(self.step.get_value())
        for variables, slots, gradients in zip(self.core_groups, self.slots, d_cores, strict=True):
            new_slots = []
            for variable, old_slots, gradient in zip(variables, slots.get_value(), gradients, strict=True):
                rows, kept = self.rule.step_rows(
                    variable.get_value().astype(jnp.float32), old_slots, gradient.astype(jnp.float32), hyper
                )
                variable.set_value(rows.astype(self.dtype))
                new_slots.append(kept)
            slots.set_value(tuple(new_slots))
        for cache, group, segment in zip(self.caches, self.groups, segments, strict=False):
            d_group = {k: d_outputs[k] for k in group}
            nothing = jnp.zeros_like(d_outputs[group[0]])
            d_all = [d_group.get(k, nothing) for k in range(len(self.specs))]
            cache.step(segment, jnp.concatenate(d_all) if len(d_all) > 1 else d_all[0], hyper)
        self.step.set_value(self.step.get_value() + 1)


@as_on_automatic_axes
def _with_rows(table: Array, ids: np.ndarray, rows: np.ndarray) -> Array:
    return table.at[ids].set(rows)
