"""Whole tables of a module, on device or host: read, write, initialise, save and count."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num, PRNGKeyArray
from numpy.typing import ArrayLike

from rsembed.arrays import foreign_to_numpy, is_traced
from rsembed.checks import NonNegativeInt, check_finite, check_type, check_within, validated
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.parallel.agreement import check_not_forked
from rsembed.storage import CacheCounts
from rsembed.storage.donation import kept
from rsembed.storage.logical_rows import as_dtype
from rsembed.tbe import functional
from rsembed.tbe.arguments import Arguments
from rsembed.tbe.functional import TBEState, everywhere, rows_of
from rsembed.tbe.host_rows import HostRows, state_bytes
from rsembed.tbe.plan import TablePlan, TBEPlan, per_table

ROWS_PER_BLOCK = 1 << 16
_STEP = Annotated[int, f"[0, {np.iinfo(np.int32).max}]"]
_NUMBERS: dict[str, object] = {
    "step": _STEP,
    "passed_step": _STEP,
    "max_counter": Annotated[float, "[0, inf)"],
}
_OPTIONAL = {*_NUMBERS, "learning_rate", "key", "contents"}
_learning_rates = jax.jit(functional.learning_rates, static_argnums=0)


def learning_rates(plan: TBEPlan, state: TBEState) -> Float[Array, " groups"]:
    """Learning rate of every group at the next step.

    Raises: ValueError: a schedule returns a rate that is not finite.
    """
    rates: Float[Array, " groups"] = _learning_rates(plan, state)
    if any(callable(group.table.learning_rate) for group in plan.groups):
        check_finite(
            rates,
            "what the schedule learning_rate gives",
            way_out="let it give a finite number at every step",
        )
    return rates


@functools.partial(jax.jit, static_argnums=(2, 3))
def _uniform_rows(
    key: PRNGKeyArray, first_row: Array | int, num_rows: int, dim: int, low: Array, high: Array
) -> Array:
    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(
        lambda row: low + (high - low) * jax.random.uniform(jax.random.fold_in(key, row), (dim,))
    )(rows)


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(array: Array, values: Array, rows: Array) -> Array:
    return array.at[rows].set(values.astype(array.dtype), unique_indices=True)


class TBEVariable(nnx.Variable):
    """Tables, optimizer states and counters of a module.

    Its backward pass trains them, not optax.
    """


class TrainedTables(nnx.Module):
    """Base of the module: tables, states and learning rates, without the lookup.

    The constructor of the subclass sets the attributes.

    Attributes:
      plan: the tables.
      state: everything that training changes, except rows that are only on the host.
      arguments: arguments of the constructor.
    """

    plan: TBEPlan
    state: TBEVariable
    arguments: Arguments
    _host_rows: HostRows | None

    @property
    def whole_state(self) -> TBEState:
        """The module's state.

        Raises: ValueError, RuntimeError: the state cannot be used, see `functional.check_state`.
        """
        state: TBEState = self.state.get_value()
        functional.check_state(self.plan, state)
        return state

    @property
    def host_rows(self) -> HostRows | None:
        """Host side of cached tables; None without cached tables.

        Outside `jit`, use this property and not `_host_rows`: it waits for compiled programs and
        repairs a change that stopped halfway.

        Raises: RuntimeError: the module's state is older than the host store, or belongs to another
          module.
        """
        if self._host_rows is not None:
            check_not_forked("the module")
            jax.effects_barrier()  # Callbacks of compiled programs may still change the host rows.
            if not is_traced(self.state.get_value().generation):
                with self._host_rows.lock:
                    self._resume()
                    self._host_rows.generation.check(self.whole_state.generation)
        return self._host_rows

    def _resume(self) -> None:
        """Makes device and host consistent after an error or Ctrl-C stopped a call halfway."""
        if self._host_rows is not None and self._host_rows.begun is not None:
            self.state.set_value(self._host_rows.resumed(self.whole_state))
            self._host_rows.end()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other thread can use the tables on the host.

        If an error or Ctrl-C leaves the context, device and host are made consistent.
        """
        check_not_forked("the module")
        if self._host_rows is None:
            yield
            return
        with self._host_rows.lock:
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # The next call reports the lost state.
                    self._resume()
                raise

    def set_learning_rate(self, lr: float | Sequence[float]) -> None:
        """Sets one learning rate for all tables, or one for each table.

        A `backward` from `vjp` uses the rate at the time of its lookup.

        Raises: ValueError: a rate is negative or not finite, the rate is a schedule, or tables that
          share an array get different rates.
        """
        rates = _rates_of_groups(self.plan, lr)
        self.state.set_value(self.whole_state._replace(learning_rates=everywhere(self.plan, rates)))

    def get_learning_rate(self) -> float | list[float]:
        """Learning rate of the next step: one number if all tables have the same, else a list."""
        rates = np.asarray(learning_rates(self.plan, self.whole_state))
        by_table = [float(rates[group]) for group, _ in self.plan.places]
        return by_table[0] if len(set(by_table)) == 1 else by_table

    @validated
    def set_optimizer_step(self, step: NonNegativeInt) -> None:
        """Sets the number of updates so far. The next training step is `step + 1`."""
        done = everywhere(self.plan, jnp.asarray(step, jnp.int32))
        self.state.set_value(self.whole_state._replace(step=done, passed_step=done + 0))

    @property
    def step(self) -> Array:
        """Number of updates so far."""
        return self.whole_state.step + 0  # A copy: the next update donates the array itself.

    def init_embedding_weights_uniform(
        self, min_val: float, max_val: float, *, key: PRNGKeyArray | None = None
    ) -> None:
        """Draws all weights from the uniform distribution between two bounds.

        Equal keys and tables give equal bits, on device, on host and on a mesh.

        Args:
          min_val: lower bound.
          max_val: upper bound.
          key: PRNG key. None takes the module's key.

        Raises: ValueError: a bound is not finite, or `min_val` is above `max_val`.
        """
        check_within("(-inf, inf)", max_val, "init_embedding_weights_uniform: max_val")
        check_within(f"(-inf, {max_val}]", min_val, "init_embedding_weights_uniform: min_val")
        key = self.whole_state.key if key is None else key
        bounds = jnp.float32(min_val), jnp.float32(max_val)
        for number, table in enumerate(self.plan.tables):
            own_key = jax.random.fold_in(key, number)

            # Every row has a PRNG key, so blocks of rows can be drawn, without a second table.
            def rows(
                first: int, last: int, own_key: PRNGKeyArray = own_key, dim: int = table.dim
            ) -> Array:
                return _uniform_rows(own_key, first, last - first, dim, *bounds)

            self._write_table(number, rows)

    def split_embedding_weights(self) -> list[Array | np.ndarray]:
        """The weights of every table, `[rows, dim]`.

        They are copies, but read-only views of the store for tables on the host.
        """
        with self._alone():
            self.flush()
            return [self._read_table(table)[0] for table in range(len(self.plan.tables))]

    def set_embedding_weights(
        self, table: int | str, weights: ArrayLike, *, allow_nonfinite: bool = False
    ) -> None:
        """Overwrites the weights of one table. Its optimizer states do not change.

        Args:
          table: number or name of the table.
          weights: `[rows, dim]`, a numpy array, JAX array or torch tensor.
          allow_nonfinite: whether NaN and infinity are accepted, False by default.

        Raises: ValueError: the table does not exist or has another shape, or a weight is not
          finite.
        """
        names = [own.name for own in self.plan.tables]
        number = names.index(table) if table in names else table
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise ValueError(f"there is no table {table!r}; there are {names}.")
        values, shape = (
            np.asarray(foreign_to_numpy(weights)),
            (self.plan.tables[number].num_rows, self.plan.tables[number].dim),
        )
        check_type(values, Num[np.ndarray, "rows dim"], f"weights of table {names[number]!r}")
        if values.shape != shape:
            raise ValueError(
                f"table {names[number]!r} has shape {shape}, the new weights {values.shape}."
            )
        if not allow_nonfinite:
            check_finite(values, f"weights of table {names[number]!r}")
        values = as_dtype(
            values, self.plan.tables[number].dtype, f"table {names[number]!r}", "weights"
        )
        self._write_table(number, lambda first, last: values[first:last])

    def split_optimizer_states(self) -> list[list[Array | np.ndarray]]:
        """Optimizer states of every table, in the order of `state_names` of its plan.

        Row-wise states are `[rows]`.

        Raises: NotImplementedError: OptimType.NONE has no states.
        """
        if self.plan.tables[0].rule is None:
            raise NotImplementedError("OptimType.NONE keeps no optimizer states.")
        with self._alone():
            self.flush()
            return [self._read_table(table)[1:] for table in range(len(self.plan.tables))]

    def get_optimizer_state(self) -> list[dict[str, Array | np.ndarray]]:
        """Optimizer states of every table by torch's names, such as `sum` or `exp_avg`.

        The number of steps, `iter`, is added for tables that have it in FBGEMM: with
        DECOUPLE_GLOBAL, and with COUNTER and ADAGRADW.
        """
        by_table = zip(self.plan.tables, self.split_optimizer_states(), strict=True)
        return [
            dict(zip(table.torch_state_names, states, strict=True))
            | ({"iter": self.step} if table.has_iter else {})
            for table, states in by_table
        ]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything that training changes, as numpy arrays.

        Names are `TABLE.weight`, `TABLE.sum` and so on for each table, then `step`, `learning_rate`
        and other numbers. `contents` is a fingerprint that `load_state_dict` checks.
        """
        plan, found = self.plan, dict[str, np.ndarray]()
        with self._alone():
            self.flush()
            state = self.whole_state
            for number, table in enumerate(plan.tables):
                found |= zip(_entries(table), map(np.array, self._read_table(number)), strict=True)
        rates = np.asarray(state.learning_rates)
        found["step"] = np.asarray(state.step)
        if plan.has_passes and state.passed_step != state.step:  # A `vjp` has begun the next step.
            found["passed_step"] = np.asarray(state.passed_step)
        found["learning_rate"] = np.asarray(
            [rates[plan.places[t][0]] for t in range(len(plan.tables))]
        )
        found["max_counter"] = np.asarray(state.max_counter)
        found["key"] = np.asarray(jax.random.key_data(state.key))
        # As numbers, because some file formats hold no texts.
        found["contents"] = np.frombuffer(plan.contents.text.encode(), np.uint8)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, ArrayLike], *, allow_nonfinite: bool = False
    ) -> None:
        """Loads a `state_dict`.

        The saved module may differ in hyperparameters, dtypes and placement.

        Args:
          state_dict: arrays by name, the result of `state_dict`.
          allow_nonfinite: whether NaN, infinity and negative sums of squares are accepted, False by
            default.

        Raises:
          ValueError: an entry is missing, unknown, out of range, not finite or has another shape,
            or `contents` has other optimizers.
          TypeError: the argument is not a mapping, or an entry is not an array of numbers.

        The module does not change if an error is raised.
        """
        check_type(state_dict, Mapping, "the state dict")
        plan, given, expected = self.plan, state_dict, dict[str, jax.ShapeDtypeStruct]()
        of_squares: set[str] = set()
        for table in plan.tables:
            expected |= _entries(table)
            of_squares |= _non_negative_entries(table)
        given = {name: foreign_to_numpy(array) for name, array in given.items()}
        missing, unknown = (
            sorted(set(expected) - set(given)),
            sorted(set(given) - set(expected) - _OPTIONAL),
        )
        if missing or unknown:
            raise ValueError(f"the state dict lacks {missing} and has unknown entries {unknown}.")
        for name, entry in expected.items():
            check_type(given[name], Num[np.ndarray, "..."], repr(name))
            if np.shape(given[name]) != entry.shape:
                raise ValueError(
                    f"{name!r} has shape {np.shape(given[name])}, but the module has {entry.shape}."
                )
            if not allow_nonfinite:
                check_finite(
                    given[name], f"the state dict: {name!r}", may_be_negative=name not in of_squares
                )
            as_dtype(given[name], entry.dtype, "the state dict", name)
        if "contents" in given:
            found = Fingerprint(np.asarray(given["contents"], np.uint8).tobytes().decode())
            way_out = (
                "Construct the module as the saved one was; to take the numbers all the same, leave out "
                "'contents'."
            )
            check_same(
                found,
                plan.contents,
                what="the state dict does not belong to this module",
                way_out=way_out,
            )
        changes = self._numbers_of(given)
        functional.check_state(plan, self.state.get_value())
        self.reset_cache_states(discard=True)  # All cached rows are replaced below.
        for number, table in enumerate(plan.tables):
            for k, name in enumerate(_entries(table)):
                values = np.asarray(given[name]).reshape(table.num_rows, -1)

                def part(first: int, last: int, values: np.ndarray = values) -> np.ndarray:
                    return values[first:last]

                self._write_table(number, part, array=k)
        self.state.set_value(self.state.get_value()._replace(**everywhere(self.plan, changes)))

    def state_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of `weights` and `optimizer_states` of every table and, as `total`, of all tables.

        If some table is cached, `total` also has the bytes of the `cache` on the device.
        """
        return state_bytes(self.plan, self.state.get_value())

    def flush(self) -> None:
        """Writes all cached rows and states to the host. They stay in the cache."""
        with self._alone():
            if (host_rows := self.host_rows) is not None:
                host_rows.flush(self.state.get_value())

    def reset_cache_states(self, *, discard: bool = False) -> None:
        """Empties the cache.

        Args:
          discard: whether the rows in the cache are dropped instead of written to the host. Their
            training since the last write is then lost, as in FBGEMM. False by default.
        """
        with self._alone():
            if self._host_rows is not None:
                if not discard:
                    self.flush()
                self.state.set_value(
                    self._host_rows.forget(self.state.get_value(), discard=discard)
                )
                self._host_rows.end()

    def get_uvm_cache_stats(self) -> CacheCounts:
        """Cache counts, summed over all lookups since the start or the last reset.

        Raises: RuntimeError: `gather_uvm_cache_stats` is False, or no table is cached.
        """
        return self._counting("gather_uvm_cache_stats").counts

    def reset_uvm_cache_stats(self) -> None:
        """Sets all cache counts to zero.

        Raises: RuntimeError: see `get_uvm_cache_stats`.
        """
        self._counting("gather_uvm_cache_stats").reset_counts()

    def get_cache_miss_counter(self) -> tuple[int, int]:
        """Number of batches with a miss, and number of unique misses.

        Raises: RuntimeError: `record_cache_metrics` does not count them, or no table is cached.
        """
        rows = self._counting("record_cache_miss_counter")
        return rows.calls_with_a_miss, rows.counts.unique_misses

    def get_table_wise_cache_miss(self) -> np.ndarray:
        """Unique misses of every feature.

        Raises: RuntimeError: `record_cache_metrics` does not count them, or no table is cached.
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
        self, table: int, rows: Callable[[int, int], ArrayLike], *, array: int = 0
    ) -> None:
        """Overwrites the weights or an optimizer state of a table, in blocks.

        Args:
          table: number of the table.
          rows: function from the first row and the end of a block to its values.
          array: 0 for the weights, k for the k-th optimizer state.
        """
        own, (number, first_row) = self.plan.tables[table], self.plan.places[table]
        with self._alone():
            if own.is_cached:
                self.reset_cache_states()
            for first in range(0, own.num_rows, ROWS_PER_BLOCK):
                state, last = self.whole_state, min(first + ROWS_PER_BLOCK, own.num_rows)
                values = np.array(rows(first, last))
                if own.is_cached:
                    stored = self.host_rows.groups[number].backing.arrays[array]  # type: ignore[union-attr]
                    stored[first_row + first : first_row + last] = values
                else:
                    self._put(
                        state,
                        number,
                        array,
                        values,
                        rows_of(self.plan, table, np.arange(first, last)),
                    )

    def _put(
        self, state: TBEState, number: int, array: int, values: np.ndarray, rows: np.ndarray
    ) -> None:
        """Overwrites rows of one array of a group on the device."""
        arrays = list(state.arrays(number))

        def keep(changed: Array) -> None:
            arrays[array] = changed
            self.state.set_value(state.with_arrays(number, arrays))

        kept(keep, _put_rows, arrays[array], values, rows)

    def _read_table(self, table: int) -> list[Array | np.ndarray]:
        """Weights and states of one table, with the shapes of a state dict. Call `flush` before."""
        state, own, (number, first_row) = (
            self.whole_state,
            self.plan.tables[table],
            self.plan.places[table],
        )
        arrays: list[Array | np.ndarray] = []
        if own.is_cached:
            for stored in self.host_rows.groups[number].backing.arrays:  # type: ignore[union-attr]
                arrays.append(view := stored[first_row : first_row + own.num_rows])
                view.flags.writeable = False
        else:
            rows = rows_of(self.plan, table, np.arange(own.num_rows))
            arrays = everywhere(self.plan, [array[rows] for array in state.arrays(number)])
        return [
            array.reshape(entry.shape)
            for array, entry in zip(arrays, _entries(own).values(), strict=True)
        ]

    def _numbers_of(self, given: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """The entries of a state dict that belong to no table.

        Raises: ValueError, TypeError: an entry has another shape or type, or is out of range.
        """
        plan, changes = self.plan, dict[str, Array]()
        for name in _NUMBERS.keys() & set(given):
            check_type(given[name], _NUMBERS[name], repr(name))
            changes[name] = jnp.asarray(
                given[name], jnp.float32 if name == "max_counter" else jnp.int32
            )
        if "step" in changes:
            changes.setdefault("passed_step", changes["step"] + 0)
        if "key" in given:
            data, shape = np.asarray(given["key"]), jax.random.key_data(jax.random.key(0)).shape
            if data.shape != shape or not np.issubdtype(data.dtype, np.integer):
                raise ValueError(
                    f"'key' must be integers of shape {shape}, got {data.dtype} of shape {data.shape}."
                )
            changes["key"] = jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32))
        rates = given.get("learning_rate")
        if rates is not None and not any(callable(table.learning_rate) for table in plan.tables):
            if np.shape(rates) not in ((), (1,), (len(plan.tables),)):
                raise ValueError(
                    f"'learning_rate' has shape {np.shape(rates)}; give one number, or one for each table."
                )
            changes["learning_rates"] = _rates_of_groups(
                plan, np.broadcast_to(rates, len(plan.tables)).tolist()
            )
        return changes


def _rates_of_groups(
    plan: TBEPlan, learning_rate: float | Sequence[float]
) -> Float[Array, " groups"]:
    """One learning rate per group.

    Raises: ValueError: tables of a group have different rates, or the rate is a schedule.
    """
    by_table = per_table(learning_rate, len(plan.tables), "learning_rate")
    for rate in by_table:
        check_within("[0, inf)", rate, "learning_rate")
    rates = []
    for group in plan.groups:
        if callable(group.table.learning_rate):
            raise ValueError(
                "the learning rate is a schedule; construct the module with a number to set it later."
            )
        own = {by_table[t] for t in group.tables}
        if len(own) > 1:
            names = [plan.tables[t].name for t in group.tables]
            raise ValueError(
                f"tables {names} share an array and so one learning rate, but were given {sorted(own)}; construct the "
                "module with different rates to keep them apart."
            )
        rates.append(own.pop())
    return jnp.asarray(rates, jnp.float32)


def _non_negative_entries(table: TablePlan) -> set[str]:
    """Names of a table's entries in a state dict that cannot be negative."""
    if table.rule is None:
        return set()
    # The names of the rule's slots come first. Names of copies of the table follow them.
    names = zip(getattr(table.rule.slot_type, "_fields", ()), table.torch_state_names, strict=False)
    return {
        f"{table.name}.{label}" for slot, label in names if slot in table.rule.non_negative_slots
    }


def _entries(table: TablePlan) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a table's entries in a state dict, by name. Row-wise states are flat."""
    # With dim 1, states `[1, 1]` and `[1, dim]` would have equal shapes.
    slots = table._replace(dim=2).first_slots()
    kinds = [(False, table.dtype), *((slot.shape[1] == 1, slot.dtype) for slot in slots)]
    labels = [f"{table.name}.{label}" for label in ("weight", *table.torch_state_names)]
    whole, flat = (table.num_rows, table.dim), (table.num_rows,)
    entries = [jax.ShapeDtypeStruct(flat if is_flat else whole, dtype) for is_flat, dtype in kinds]
    return dict(zip(labels, entries, strict=True))
