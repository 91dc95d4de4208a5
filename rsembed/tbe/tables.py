"""Whole tables of a module, on device or host: read, write, initialise, save and count."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray
from numpy.typing import ArrayLike

from rsembed.arrays import copied_rows, foreign_to_numpy, is_traced
from rsembed.checks import NonNegativeInt, check_finite, check_type, check_within, validated
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels.contract import Call
from rsembed.parallel.agreement import check_not_forked
from rsembed.storage import CacheCounts
from rsembed.storage.donation import kept
from rsembed.storage.logical_rows import as_dtype
from rsembed.tbe import functional
from rsembed.tbe.arguments import Arguments, EmbOptimType
from rsembed.tbe.functional import Rates, TBEState, everywhere
from rsembed.tbe.host_rows import HostRows, keep_arrays
from rsembed.tbe.plan import AnyBatch, TablePlan, TBEPlan, engine_of, per_table

ROWS_PER_BLOCK = 1 << 16
_STEP = Annotated[int, f"[0, {np.iinfo(np.int32).max}]"]
_NUMBERS: dict[str, object] = {
    "step": _STEP,
    "passed_step": _STEP,
    "max_counter": Annotated[float, "[0, inf)"],
}
_OPTIONAL = {*_NUMBERS, "learning_rate", "key", "contents"}
_learning_rates = jax.jit(functional.learning_rates, static_argnums=0)


def learning_rates(
    plan: TBEPlan,
    state: TBEState,
) -> Rates:
    """Learning rate of every group at the next step.

    Raises: ValueError: a schedule returns a rate that is not finite.
    """
    rates: Rates = _learning_rates(plan, state)
    if any(callable(table.rule.learning_rate) for table in plan.tables):
        check_finite(
            rates,
            "what the schedule learning_rate gives",
            way_out="let it give a finite number at every step",
        )
    return rates


@functools.partial(jax.jit, static_argnames=("num_rows", "dim"))
def _uniform_rows(
    first_row: Int[Array, ""] | int,
    num_rows: int,
    *,
    key: PRNGKeyArray,
    dim: int,
    low: Float[Array, ""],
    high: Float[Array, ""],
) -> Float[Array, "rows dim"]:
    # The PRNG key of a row depends on the row number, so a table can be drawn in blocks of rows,
    # without memory for a copy of the whole table.
    def draw(row: Int[Array, ""]) -> Float[Array, " dim"]:
        row_key = jax.random.fold_in(key, row)
        return low + (high - low) * jax.random.uniform(row_key, (dim,))

    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(draw)(rows)


class _Entry(NamedTuple):
    """Shape and dtype of an array in a state dict, and whether its numbers may be negative."""

    shape: tuple[int, ...]
    dtype: np.dtype
    may_be_negative: bool


def _cut(
    values: np.ndarray,
    first_row: int,
    num_rows: int,
) -> np.ndarray:
    return values[first_row : first_row + num_rows]


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(array: Array, values: Array, rows: Array) -> Array:
    return array.at[rows].set(values.astype(array.dtype), unique_indices=True)


class TBEVariable(nnx.Variable):
    """Tables, optimizer states and counters of a module.

    The backward pass of the module trains the tables, so optax must not train them.
    """


class TrainedTables(nnx.Module):
    """Base class that gives `TableBatchedEmbeddingBags` access to whole tables and learning rates.

    The subclass `TableBatchedEmbeddingBags` implements lookups. Its constructor sets the attributes
    of `TrainedTables`.

    Attributes:
      plan: plan of the module's tables.
      state: variable with everything that training changes, except rows that are only on the host.
      arguments: arguments of the module's constructor.
    """

    plan: TBEPlan
    state: TBEVariable
    arguments: Arguments
    _host_rows: HostRows | None

    @property
    def whole_state(self) -> TBEState:
        """The module's `TBEState`.

        Raises: ValueError, RuntimeError: the state cannot be used, see `functional.check_state`.
        """
        state: TBEState = self.state.get_value()
        functional.check_state(self.plan, state)
        return state

    @property
    def host_rows(self) -> HostRows | None:
        """The rows of cached tables on the host, or None if no table is cached.

        Outside `jit`, use `host_rows` and not `_host_rows`, because `host_rows` waits until running
        programs have finished. If an error or Ctrl-C has stopped a change of rows halfway,
        `host_rows` makes the rows on the device and on the host consistent.

        Raises: RuntimeError: the module's state is older than the host store, or belongs to a
          different module.
        """
        host = self._host_rows
        if host is not None:
            check_not_forked("the module")
            # Wait for the callbacks of running programs, because a callback may change the rows on
            # the host.
            jax.effects_barrier()
            if not is_traced(self.state.get_value().generation):
                with host.lock:
                    self._resume(host)
                    host.generation.check(self.whole_state.generation)
        return host

    def _resume(self, host: HostRows) -> None:
        """Makes rows on device and host consistent if a change of rows was stopped halfway."""
        if host.begun is not None:
            functional.check_state(self.plan, self.state.get_value())
            host.resume(self.state)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context manager that locks the tables on the host, so that no other thread can use them.

        If an error or Ctrl-C ends the `with` block, the rows on the device and on the host are made
        consistent.
        """
        check_not_forked("the module")
        host = self._host_rows
        if host is None:
            yield
            return
        with host.lock:
            try:
                yield
            except BaseException:
                # If `_resume` fails, the next call of the module reports that the state is lost.
                with contextlib.suppress(RuntimeError):
                    self._resume(host)
                raise

    def set_learning_rate(self, lr: float | Sequence[float]) -> None:
        """Sets one learning rate for all tables, or one for each table.

        A `backward` function that `vjp` returned before this call keeps the previous learning rate.

        Raises: ValueError: a rate is negative or not finite, the module was constructed with a
          learning rate schedule, or tables that share an array get different rates.
        """
        self._set_numbers(learning_rates=_rates_of_groups(self.plan, lr))

    def _set_numbers(self, **numbers: Array) -> None:
        """Sets fields of the state that have the same value on all devices, such as `step`."""
        state = self.whole_state._replace(**everywhere(self.plan, numbers))
        self.state.set_value(state)

    def get_learning_rate(self) -> float | list[float]:
        """Learning rate of the next step.

        One number if all tables have equal rates, else a list with one number per table.
        """
        by_table = self._of_tables(learning_rates(self.plan, self.whole_state))
        if len(set(by_table)) == 1:
            return by_table[0]
        return by_table

    def _of_tables(self, rates: Rates) -> list[float]:
        """Learning rate of each table, from the rates of the groups."""
        rate_of_group = dict(zip(self.plan.groups, rates.tolist(), strict=True))
        of_tables = []
        for table in self.plan.tables:
            group, _ = self.plan.places[table.name]
            of_tables.append(rate_of_group[group])
        return of_tables

    @validated
    def set_optimizer_step(self, step: NonNegativeInt) -> None:
        """Sets the step counter, as if the module had made `step` training steps.

        In the next training step, a learning rate schedule that takes the step number gets `step`.
        The formulas of an optimizer count steps from 1, so the next training step has the number
        `step + 1`.
        """
        done = jnp.asarray(step, jnp.int32)
        self._set_numbers(step=done, passed_step=done + 0)

    @property
    def step(self) -> Array:
        """Number of training steps so far."""
        # The array in the state will be donated to the next update, so the result is a copy.
        return self.whole_state.step + 0

    def init_embedding_weights_uniform(
        self,
        min_val: float,
        max_val: float,
        *,
        key: PRNGKeyArray | None = None,
    ) -> None:
        """Draws all weights from the uniform distribution between two bounds.

        With the same key, tables on one device, on the host and on a mesh get bit-identical
        weights.

        Args:
          min_val: lower bound of the weights.
          max_val: upper bound of the weights.
          key: PRNG key. By default, the PRNG key in the state of the module.

        Raises: ValueError: a bound is not finite, or `min_val` is above `max_val`.
        """
        check_within("(-inf, inf)", max_val, "init_embedding_weights_uniform: max_val")
        check_within(f"(-inf, {max_val}]", min_val, "init_embedding_weights_uniform: min_val")
        if key is None:
            key = self.whole_state.key
        for number, table in enumerate(self.plan.tables):
            draw = functools.partial(
                _uniform_rows,
                key=jax.random.fold_in(key, number),
                dim=table.dim,
                low=jnp.float32(min_val),
                high=jnp.float32(max_val),
            )
            self._write_table(table, draw)

    def split_embedding_weights(self) -> list[Array | np.ndarray]:
        """The weights of every table, as arrays `[rows, dim]`.

        For a table on the host, the array is a read-only view of the stored weights. For a table on
        the device, the array is a copy.
        """
        with self._alone():
            self.flush()
            return [self._read_table(table)[0] for table in self.plan.tables]

    def set_embedding_weights(
        self,
        table: int | str,
        weights: ArrayLike,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Overwrites the weights of one table, but not the optimizer states of the table.

        Args:
          table: index or name of the table.
          weights: new weights `[rows, dim]`, as a numpy array, JAX array or torch tensor.
          allow_nonfinite: whether NaN and infinity are accepted, False by default.

        Raises: ValueError: the table does not exist, `weights` has the wrong shape, or a weight is
          not finite.
        """
        names = [plan.name for plan in self.plan.tables]
        number = names.index(table) if table in names else table
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise ValueError(f"there is no table {table!r}; there are {names}.")
        plan = self.plan.tables[number]
        entry = _entries(plan)[f"{plan.name}.weight"]
        values = _checked(
            weights,
            entry,
            f"table {plan.name!r}",
            "weights",
            allow_nonfinite=allow_nonfinite,
        )
        self._write_table(plan, functools.partial(_cut, values))

    def split_optimizer_states(self) -> list[list[Array | np.ndarray]]:
        """Optimizer states of every table, in the order of `TablePlan.state_names`.

        A state with one number per row has the shape `[rows]`.

        Raises: NotImplementedError: OptimType.NONE has no states.
        """
        if self.plan.tables[0].optimizer == EmbOptimType.NONE:
            raise NotImplementedError("OptimType.NONE keeps no optimizer states.")
        with self._alone():
            self.flush()
            return [self._read_table(table)[1:] for table in self.plan.tables]

    def get_optimizer_state(self) -> list[dict[str, Array | np.ndarray]]:
        """For every table, a dictionary of its optimizer states under torch's names, such as `sum`.

        As in FBGEMM, the dictionary of a table contains the number of steps, under the name `iter`,
        if the weight decay mode is DECOUPLE_GLOBAL, or COUNTER with ADAGRADW.
        """
        of_tables: list[dict[str, Array | np.ndarray]] = []
        for table, states in zip(self.plan.tables, self.split_optimizer_states(), strict=True):
            by_name = dict(zip(table.torch_state_names, states, strict=True))
            if table.has_iter:
                by_name["iter"] = self.step
            of_tables.append(by_name)
        return of_tables

    def state_dict(self) -> dict[str, np.ndarray]:
        """Dictionary from names to NumPy arrays, with everything that training changes.

        The names are `TABLE.weight`, `TABLE.sum` and so on for each table, then `step`,
        `learning_rate` and the module's other counters. The entry `contents` is a fingerprint that
        `load_state_dict` checks.
        """
        plan = self.plan
        saved: dict[str, np.ndarray] = {}
        with self._alone():
            self.flush()
            state = self.whole_state
            for table in plan.tables:
                arrays = self._read_table(table)
                for name, array in zip(_entries(table), arrays, strict=True):
                    saved[name] = np.array(array)
        saved["step"] = np.asarray(state.step)
        if plan.has_passes and state.passed_step != state.step:
            # `vjp` has begun the next training step, but `backward` has not been called yet.
            saved["passed_step"] = np.asarray(state.passed_step)
        saved["learning_rate"] = np.asarray(self._of_tables(state.learning_rates), np.float32)
        saved["max_counter"] = np.asarray(state.max_counter)
        saved["key"] = np.asarray(jax.random.key_data(state.key))
        # The fingerprint is saved as an array of bytes, because some file formats have no strings.
        saved["contents"] = np.frombuffer(plan.contents.text.encode(), np.uint8)
        return saved

    def load_state_dict(
        self,
        state_dict: Mapping[str, ArrayLike],
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Loads a result of `state_dict`, which may come from a different module.

        The saved module and the loading module may differ in hyperparameters, dtypes and
        placements. If an error is raised, the module does not change.

        Args:
          state_dict: dictionary from names to arrays, as the method `state_dict` returns it.
          allow_nonfinite: whether NaN, infinity and negative sums of squares are accepted, False by
            default.

        Raises:
          ValueError: an entry is missing, unknown, out of range, not finite or of the wrong shape,
            or `contents` is the fingerprint of different tables or optimizers.
          TypeError: the argument is not a mapping, or an entry is not an array of numbers.
        """
        check_type(state_dict, Mapping, "the state dict")
        plan = self.plan
        expected: dict[str, _Entry] = {}
        for table in plan.tables:
            expected |= _entries(table)
        saved = {name: foreign_to_numpy(array) for name, array in state_dict.items()}
        missing = sorted(set(expected) - set(saved))
        unknown = sorted(set(saved) - set(expected) - _OPTIONAL)
        if missing or unknown:
            raise ValueError(f"the state dict lacks {missing} and has unknown entries {unknown}.")
        for name, entry in expected.items():
            _checked(
                saved[name],
                entry,
                "the state dict",
                name,
                allow_nonfinite=allow_nonfinite,
            )
        if "contents" in saved:
            text = np.asarray(saved["contents"], np.uint8).tobytes().decode()
            check_same(
                Fingerprint(text),
                plan.contents,
                what="the state dict does not belong to this module",
                way_out="Construct the module with the tables and optimizers of the saved module; or leave out "
                "'contents' to load the arrays without this check.",
            )
        numbers = self._numbers_of(saved)
        functional.check_state(plan, self.state.get_value())
        # The cached rows need not be written to the host, because `_write_table` overwrites all
        # rows of all tables.
        self.reset_cache_states(discard=True)
        for table in plan.tables:
            for array, name in enumerate(_entries(table)):
                values = np.asarray(saved[name]).reshape(table.num_rows, -1)
                self._write_table(table, functools.partial(_cut, values), array=array)
        self._set_numbers(**numbers)

    def state_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of `weights` and `optimizer_states` of each table, under the name of the table.

        The entry `total` has the sums over all tables. If a table is cached, `total` also has the
        bytes of the `cache` on the device.
        """
        sizes = dict[str, dict[str, int]]()
        total = {"weights": 0, "optimizer_states": 0}
        for table in self.plan.tables:
            weights, *states = table.first_row()
            sizes[table.name] = {
                "weights": table.num_rows * weights.nbytes,
                "optimizer_states": table.num_rows * sum(array.nbytes for array in states),
            }
            for kind, size in sizes[table.name].items():
                total[kind] += size
        if self._host_rows is not None:
            total["cache"] = 0
            for group in self._host_rows.groups:
                *arrays, _ = self.state.get_value().arrays[group]
                total["cache"] += sum(array.nbytes for array in arrays)
        return {**sizes, "total": total}

    def _report(self, batch: AnyBatch, output: Array) -> None:
        """Reports counts and bytes under FBGEMM's names, once in `interval` training steps.

        Inside `jit`, the method warns and reports nothing.
        """
        config = self.arguments.stats_reporter_config
        if config is None:
            return
        if is_traced(batch):
            warnings.warn(
                "stats_reporter_config: no effect inside jit, where steps are not reported; train outside of it, or "
                "read state_bytes() and get_uvm_cache_stats() between compiled steps.",
                stacklevel=3,
            )
            return
        step = int(self.whole_state.step)
        if step % config.interval:
            return
        by_table = self.state_bytes()
        cache = by_table["total"].get("cache", 0)
        figures: dict[str, float] = {"tbe.hbm.cache": cache}
        for kind, is_cached, extra in (("hbm", False, cache), ("uvm", True, 0)):
            weights = 0
            states = 0
            for table in self.plan.tables:
                if table.is_cached == is_cached:
                    weights += by_table[table.name]["weights"]
                    states += by_table[table.name]["optimizer_states"]
            total = weights + states + extra
            figures[f"tbe.{kind}.embeddings"] = weights
            figures[f"tbe.{kind}.optimizer_states"] = states
            figures[f"tbe.{kind}.total_static_sparse"] = total
            figures[f"tbe.total_{kind}_usage"] = total
        lists: Any = batch.lists if isinstance(batch, Call) else batch.values()
        ids = [bags.ids for bags in lists]
        for name, arrays in (("input", ids), ("output", [output])):
            figures[f"tbe.fwd_{name}_count"] = sum(array.size for array in arrays)
            figures[f"tbe.fwd_{name}_size"] = sum(array.nbytes for array in arrays)
        if config.report is not None:
            config.report(step, figures)
            return
        text = ", ".join(f"{name} {value:g}" for name, value in figures.items())
        logging.getLogger("rsembed").info("step %d: %s", step, text)

    def flush(self) -> None:
        """Writes all cached rows and their optimizer states to the host, and keeps them cached."""
        with self._alone():
            host_rows = self.host_rows
            if host_rows is not None:
                host_rows.flush(self.state.get_value())

    def reset_cache_states(self, *, discard: bool = False) -> None:
        """Empties the cache.

        Args:
          discard: whether the cached rows are discarded instead of written to the host, False by
            default. With `discard=True`, updates of cached rows since the last write to the host
            are lost, as in FBGEMM.
        """
        with self._alone():
            if self._host_rows is not None:
                if not discard:
                    self.flush()
                self._host_rows.forget(self.state, discard=discard)

    def get_uvm_cache_stats(self) -> CacheCounts:
        """Cache hits, misses and other counts, summed since construction or the last reset.

        Raises: RuntimeError: `gather_uvm_cache_stats` is False, or no table is cached.
        """
        return self._counting("gather_uvm_cache_stats").counts

    def reset_uvm_cache_stats(self) -> None:
        """Sets all cache counts to zero.

        Raises: RuntimeError: see `get_uvm_cache_stats`.
        """
        self._counting("gather_uvm_cache_stats").reset_counts()

    def get_cache_miss_counter(self) -> tuple[int, int]:
        """Number of batches with a cache miss, and number of cache misses in all batches.

        A row that a batch reads several times counts as one miss.

        Raises: RuntimeError: `record_cache_metrics` does not enable `get_cache_miss_counter`, or
          no table is cached.
        """
        rows = self._counting("record_cache_miss_counter")
        return rows.calls_with_a_miss, rows.counts.unique_misses

    def get_table_wise_cache_miss(self) -> np.ndarray:
        """Number of cache misses of every feature, summed over all batches.

        A row that a feature reads several times in a batch counts as one miss.

        Raises: RuntimeError: `record_cache_metrics` does not enable `get_table_wise_cache_miss`, or
          no table is cached.
        """
        return self._counting("record_tablewise_cache_miss").misses_by_feature.copy()

    def _counting(self, argument: str) -> HostRows:
        asked = vars(self.arguments) | vars(self.arguments.record_cache_metrics)
        if self.host_rows is None or not asked[argument]:
            raise RuntimeError(
                f"needs a table with MANAGED_CACHING, and {argument}=True at construction."
            )
        return self.host_rows

    def _write_table(
        self,
        table: TablePlan,
        rows: Callable[[int, int], ArrayLike],
        *,
        array: int = 0,
    ) -> None:
        """Overwrites the weights or an optimizer state of a table, block by block.

        Args:
          table: plan of the table.
          rows: function `(first_row, num_rows)` that returns the new values of a block of rows.
          array: index of the array to overwrite: 0, the default, for the weights, and `k` for the
            `k`-th optimizer state.
        """
        with self._alone():
            if table.is_cached:
                self.reset_cache_states()
            for first in range(0, table.num_rows, ROWS_PER_BLOCK):
                num_rows = min(ROWS_PER_BLOCK, table.num_rows - first)
                values = np.array(rows(first, num_rows))
                if table.is_cached:
                    stored = self._host_arrays(table)[array]
                    stored[first : first + num_rows] = values
                else:
                    self._put(table, array, first, values)

    def _put(
        self,
        table: TablePlan,
        array: int,
        first: int,
        values: np.ndarray,
    ) -> None:
        """Overwrites rows of a table, from row `first` on, in one of its arrays on the device."""
        group, _ = self.plan.places[table.name]
        arrays = list(self.whole_state.arrays[group])

        def keep(changed: Array) -> None:
            arrays[array] = changed
            keep_arrays(self.state, group, arrays)

        rows = self._rows_of(table, first, len(values))
        kept(keep, _put_rows, arrays[array], values, rows)

    def _rows_of(
        self,
        table: TablePlan,
        first: int,
        num_rows: int,
    ) -> Int[np.ndarray, " rows"]:
        """Positions of consecutive rows of a table in the device arrays of the table's group."""
        group, _ = self.plan.places[table.name]
        layout = engine_of(self.plan).stacks[group].layout
        ids = np.arange(first, first + num_rows)
        rows: np.ndarray = layout.rows(table.name, ids)
        return rows

    def _host_arrays(self, table: TablePlan) -> list[np.ndarray]:
        """Weights and states of a cached table, as views of the arrays on the host."""
        group, first_row = self.plan.places[table.name]
        stored = self.host_rows.groups[group].backing.arrays  # type: ignore[union-attr]
        return [_cut(array, first_row, table.num_rows) for array in stored]

    def _read_table(self, table: TablePlan) -> list[Array | np.ndarray]:
        """Weights and states of one table, with the shapes that they have in a state dict.

        Call `flush` first, because the latest values of cached rows may be on the device only.
        """
        arrays: list[Array | np.ndarray] = []
        if table.is_cached:
            for view in self._host_arrays(table):
                view.flags.writeable = False
                arrays.append(view)
        else:
            group, _ = self.plan.places[table.name]
            layout = engine_of(self.plan).stacks[group].layout
            index = layout.all_rows(table.name, table.num_rows)
            on_device = copied_rows(self.whole_state.arrays[group], index)
            arrays = list(everywhere(self.plan, on_device))
        shaped = []
        for array, entry in zip(arrays, _entries(table).values(), strict=True):
            shaped.append(array.reshape(entry.shape))
        return shaped

    def _numbers_of(self, saved: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Checks the entries of a state dict that belong to no table.

        Returns: dictionary from the names of fields of `TBEState` to the new values of the fields.

        Raises: ValueError, TypeError: an entry has the wrong shape or type, or is out of range.
        """
        numbers: dict[str, Array] = {}
        for name in _NUMBERS.keys() & set(saved):
            check_type(saved[name], _NUMBERS[name], repr(name))
            dtype = jnp.float32 if name == "max_counter" else jnp.int32
            numbers[name] = jnp.asarray(saved[name], dtype)
        if "step" in numbers:
            numbers.setdefault("passed_step", numbers["step"] + 0)
        if "key" in saved:
            data = np.asarray(saved["key"])
            shape = jax.random.key_data(jax.random.key(0)).shape
            if data.shape != shape or not np.issubdtype(data.dtype, np.integer):
                raise ValueError(
                    f"'key' must be integers of shape {shape}, got {data.dtype} of shape {data.shape}."
                )
            numbers["key"] = jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32))
        rates = saved.get("learning_rate")
        has_schedule = any(callable(table.rule.learning_rate) for table in self.plan.tables)
        if rates is not None and not has_schedule:
            numbers["learning_rates"] = _rates_of_groups(self.plan, np.asarray(rates).tolist())
        return numbers


def _checked(
    values: ArrayLike,
    entry: _Entry,
    where: str,
    name: str,
    *,
    allow_nonfinite: bool,
) -> np.ndarray:
    """New values of an array, as a NumPy array in the dtype of `entry`.

    Args:
      values: numpy array, JAX array or torch tensor.
      entry: shape and dtype that the module has, and whether its numbers may be negative.
      where: what the array is a part of, for error messages.
      name: name of the array, for error messages.
      allow_nonfinite: whether NaN, infinity and negative sums of squares are accepted.

    Raises: ValueError, TypeError: the array has the wrong shape, a number is out of range or not
      finite, or the values are not an array of numbers.
    """
    array = foreign_to_numpy(values)
    what = f"{where}: {name!r}"
    check_type(array, Num[np.ndarray, "..."], what)
    if np.shape(array) != entry.shape:
        raise ValueError(f"{what} has shape {np.shape(array)}, but the module has {entry.shape}.")
    if not allow_nonfinite:
        check_finite(array, what, may_be_negative=entry.may_be_negative)
    return as_dtype(array, entry.dtype, where, name)


def _rates_of_groups(
    plan: TBEPlan,
    learning_rate: float | Sequence[float],
) -> Rates:
    """Learning rate of each group, from one rate for all tables or a list with one per table.

    Raises: ValueError: tables of a group have different rates, or a table was constructed with a
      learning rate schedule.
    """
    by_table = per_table(learning_rate, len(plan.tables), "learning_rate")
    by_group: dict[str, dict[str, float]] = {}
    for table, rate in zip(plan.tables, by_table, strict=True):
        check_within("[0, inf)", rate, "learning_rate")
        if callable(table.rule.learning_rate):
            raise ValueError(
                "the learning rate is a schedule; construct the module with a number to set it later."
            )
        group, _ = plan.places[table.name]
        by_group.setdefault(group, {})[table.name] = rate
    rates = []
    for of_tables in by_group.values():
        distinct = set(of_tables.values())
        if len(distinct) > 1:
            raise ValueError(
                f"tables {list(of_tables)} share an array and so one learning rate, but were given {sorted(distinct)}; "
                "construct the module with different rates to keep them apart."
            )
        rates.append(distinct.pop())
    return jnp.asarray(rates, jnp.float32)


def _entries(table: TablePlan) -> dict[str, _Entry]:
    """The arrays of a table in a state dict, by name: the weights, then the optimizer states.

    A state with one number per row has the shape `[rows]`.
    """
    # With dim 2, `first_row` returns `[1, 1]` for a state with one number per row, and `[1, 2]` for
    # a state with `dim` numbers per row. With dim 1, `first_row` would return `[1, 1]` for both
    # kinds of states.
    arrays = table._replace(dim=2).first_row()
    names = ("weight", *table.torch_state_names)
    slots = table.rule.slot_type._fields  # type: ignore[attr-defined]
    # A slow copy of the table, after the slots, may be negative, like the weights.
    fields = ("weight", *slots, "slow copy")
    entries = {}
    for name, field, array in zip(names, fields, arrays, strict=False):
        shape: tuple[int, ...] = (table.num_rows, table.dim)
        if array.shape[1] == 1:
            shape = (table.num_rows,)
        may_be_negative = field not in table.rule.non_negative_slots
        entries[f"{table.name}.{name}"] = _Entry(shape, array.dtype, may_be_negative)
    return entries
