"""`EmbeddingVariable`: a table over the devices as a variable of a model, looked up and trained in groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from rsembed.bags import check_not_taken, is_traced
from rsembed.checks import NonNegativeInt, PositiveInt, check_type, check_within, dtype_among, validated
from rsembed.fingerprint import check_same
from rsembed.homes import Hashed, hashed_rows
from rsembed.homes.logical_rows import keys_to_leave
from rsembed.keys import KEY_DTYPES
from rsembed.optimizers import AdagradOptimizerSpec, OptimizerSpec
from rsembed.sok.initialize import Context, current_context
from rsembed.sok.named_initializers import named_initializer
from rsembed.sok.policies import EmbeddingVariableOption, core_policies
from rsembed.sok.row_numbers import RowNumbers
from rsembed.sok.sharded_table import ShardedTable, TableState
from rsembed.specs import TableSpec


class EmbeddingVariable(nnx.Variable):
    """A table over the devices: trained by its own optimizer, not by optax.

    Made by `embedding_variable`, and by the layers. Its `table` says what it is; the value is a `TableState`.
    """

    @property
    def num_rows(self) -> int:
        """Keys that have a row, over all devices."""
        return int(self.counts()["rows"].sum())

    def counts(self) -> dict[str, np.ndarray]:
        """What happened so far on each device: `rows` in use, keys `inserted`, `evicted`, `failed`, ...

        Evaluation under a transformation that the variable is not an argument of counts nothing.
        """
        return hashed_rows.counts(state_of(self).shards, self.table.context.num_devices)

    @validated
    def evict(
        self, *, keep: int | None = None, steps_to_live: int | None = None, l2_weight_threshold: float | None = None
    ) -> dict[str, np.ndarray]:
        """Takes their rows from keys, outside of `jit`, and hands them out.

        Args:
          keep: so many keys keep their rows, over all devices: those that `eviction` lets go last.
          steps_to_live: keys go that were not used in training for more than this many steps, as in `evict_older`.
          l2_weight_threshold: keys go whose rows have less than this half of a squared L2 norm, as DeepRec has it.

        Without any of these, what the table was made with decides.

        Returns: the rows, as `export_rows` returns them; `assign_rows` brings them back.

        Raises:
          TypeError or ValueError: nothing says who goes, or a number is out of range.
          NotImplementedError: the table has no hash table.
          RuntimeError: this is inside `jit`.
        """
        table = self.table
        if keep is None and steps_to_live is None and l2_weight_threshold is None:
            steps_to_live, l2_weight_threshold = table.steps_to_live, table.l2_weight_threshold
        if keep is None and steps_to_live is None and l2_weight_threshold is None:
            raise ValueError(
                f"table {table.spec.name!r}: evict needs keep, steps_to_live or l2_weight_threshold; pass one, or make "
                "the table with one."
            )
        if not table.use_hashtable:
            raise NotImplementedError(f"table {table.spec.name!r} has no hash table; its keys keep their rows.")
        for name, value in (("keep", keep), ("steps_to_live", steps_to_live)):
            check_type(value, NonNegativeInt | None, f"table {table.spec.name!r}: evict: {name}")
        check_within("[0, inf)", l2_weight_threshold, f"table {table.spec.name!r}: evict: l2_weight_threshold")
        state, evictor = state_of(self), table.evictor
        if is_traced(state):
            raise RuntimeError("evict works beside compiled programs; call it outside of jit, between two steps.")
        squares = None if l2_weight_threshold is None else 2 * l2_weight_threshold
        reasons: dict[str, Any] = {"keep": keep, "unused_for": steps_to_live, "squares_below": squares}
        keys = keys_to_leave(state.shards, evictor.score, **reasons, step=int(state.step))
        shards, rows = evictor.take_out(state.shards, state.slots, keys)
        if steps_to_live is not None:
            shards = evictor.forget_older(shards, state.step, steps_to_live)
        self.set_value(state._replace(shards=shards))
        return rows

    def evict_older(self) -> None:
        """Frees the rows of keys that were not trained for `steps_to_live` steps; see `hashed_rows.evict_older`.

        As `evict`, but compiled, also inside `jit`, and the rows are gone.

        Raises: ValueError: the table was made without `steps_to_live`.
        """
        if self.table.steps_to_live is None:
            raise ValueError(
                f"table {self.table.spec.name!r}: evict_older needs steps_to_live; make the table with it."
            )
        self.set_value(_evict_older(self.table, state_of(self)))

    @validated
    def grow(self, rows_per_device: PositiveInt) -> None:
        """Makes room for more rows; programs that use the variable are compiled anew.

        Raises:
          ValueError: it has more rows already.
          NotImplementedError: it has no hash table.
        """
        if not self.table.use_hashtable:
            raise NotImplementedError(f"table {self.table.spec.name!r} has no hash table; its size is fixed.")
        num_waiting = rows_per_device if self.table.home.admission_capacity is None else 0
        self.set_value(grown(self.table, state_of(self), rows_per_device, num_waiting))


def state_of(variable: EmbeddingVariable) -> TableState:
    """The variable's value. Raises: ValueError: it is the state of another table. RuntimeError: a step took it over."""
    state: TableState = variable.get_value()
    way_out = (
        "where an error or Ctrl-C broke that step off, make the layer anew and sok.load the latest dump; where a copy "
        "that shared the arrays took it, go on with the copy"
    )
    check_not_taken(state, f"table {variable.table.spec.name!r} has lost its rows", way_out)
    check_same(
        state.layout,
        variable.table.layout,
        what=f"table {variable.table.spec.name!r} was given a state that is not its own",
        way_out="Take rows over by key, with export_rows and assign_rows, or with dump and load.",
    )
    return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _evict_older(table: ShardedTable, state: TableState) -> TableState:
    def on_device(own: TableState) -> tuple[Any, Any]:
        return hashed_rows.evict_older(own.shards, own.step, table.steps_to_live or 0), own.slots

    return table.on_shards(on_device, state)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def grown(table: ShardedTable, state: TableState, capacity: int, num_waiting: int) -> TableState:
    """The state with room for `capacity` rows, and `num_waiting` keys that wait for one, on every device."""

    def on_device(own: TableState) -> tuple[Any, Any]:
        return hashed_rows.grow(own.shards, own.slots, table.spec, capacity, num_waiting)

    return table.on_shards(on_device, state)


@validated
def embedding_variable(
    name: str,
    embedding_dim: int,
    *,
    rows_per_device: int,
    use_hashtable: bool = True,
    key_dtype: Any = "int64",
    initializer: str | float | Callable[..., Array] = "uniform",
    optimizer: OptimizerSpec | None = None,
    exchange_capacity: PositiveInt | None = None,
    context: Context | None = None,
    rngs: nnx.Rngs | None = None,
    dtype: str = "float32",
    steps_to_live: int | None = None,
    l2_weight_threshold: float | None = None,
    ev_option: EmbeddingVariableOption | None = None,
    **policies: Any,
) -> EmbeddingVariable:
    """A table whose row of key `k` lies on device `k % n`.

    Args:
      name: unique in a model; the initial rows depend on it.
      embedding_dim: length of a row.
      rows_per_device: room for rows on each device.
      use_hashtable: keys of any size get rows when they are first trained; else keys are row numbers below
        `rows_per_device * n`.
      key_dtype: int32, int64, uint32 or uint64.
      initializer: `(key, shape) -> array`, called for single rows; or "uniform" (from -0.05 to 0.05), "normal" (0.05),
        "truncated_normal", "zeros", "ones", by any name that Keras has for them; or a number. A key's first row depends
        on `rngs`, the table's name and the key alone.
      optimizer: steps the rows that a batch looked up; None is Adagrad. `sok.optimizers` has those of the original.
      exchange_capacity: places per block of the exchange, see `parallel.rounds.ask`; None means `default_capacity`.
      context: the devices; None means those of `Init`.
      rngs: its stream `params` seeds the table; None means `nnx.Rngs(0)`.
      dtype: of the rows: float32, bfloat16 or float16.
      steps_to_live: `evict` takes rows that were not used in training for more than this many steps; None keeps them.
      l2_weight_threshold: `evict` takes rows of which half of the squared L2 norm is less; None keeps them.
      ev_option: the same, and admission, as DeepRec has it.
      **policies: `when_full`, `eviction`, `admission_count`, `admission_capacity` and `admission_probability` of a hash
        table: see `rsembed.Hashed`. Here `when_full="error"` raises in the lookup, and `when_full="grow"` makes the
        table larger. By the names of SOK, `evict_strategy` ("LRU" or "LFU", evicts when full) and `filter_ratio` (the
        probability).

    Raises: ValueError: an argument is out of range. TypeError: it is unknown.
    """
    context, where = current_context(context), f"table {name!r}"
    check_type(rows_per_device, PositiveInt, f"{where}: rows_per_device")
    num_devices = context.num_devices
    num_rows = rows_per_device * num_devices
    stay = {"steps_to_live": steps_to_live, "l2_weight_threshold": l2_weight_threshold}
    policies = core_policies(where, ev_option, policies | stay)
    unused = [] if use_hashtable else list(policies)
    steps_to_live, l2_weight_threshold = (policies.pop(name, None) for name in stay)
    check_type(steps_to_live, NonNegativeInt | None, f"{where}: steps_to_live")
    check_within("[0, inf)", l2_weight_threshold, f"{where}: l2_weight_threshold")
    if grows := policies.get("when_full") == "grow":
        policies = policies | {"when_full": "error"}  # until the variable has more room
    of_keys: dict[str, Any] = {"key_dtype": dtype_among(KEY_DTYPES, key_dtype, f"{where}: key_dtype")}
    storage: Any = Hashed(**of_keys, **policies)
    if not use_hashtable:
        if unused:
            raise ValueError(f"{where}: {', '.join(unused)} concern hash tables; use_hashtable is False.")
        if num_rows > 2**32:
            raise ValueError(
                f"{where}: {rows_per_device} rows on each of {num_devices} devices are more than 2**32; take "
                "use_hashtable=True."
            )
        storage = RowNumbers(**of_keys, num_shards=num_devices)
    spec = TableSpec(
        name=name,
        vocabulary_size=num_rows,
        embedding_dim=embedding_dim,
        initializer=named_initializer(initializer, name),
        optimizer=AdagradOptimizerSpec() if optimizer is None else optimizer,
        dtype=dtype,
        storage=storage,
    )
    table = ShardedTable(spec, context, exchange_capacity, grows, steps_to_live, l2_weight_threshold)
    key = (nnx.Rngs(0) if rngs is None else rngs).params()
    return EmbeddingVariable(table.init(key), table=table)


def split_embedding_variable_from_others(
    variables: Any,
) -> tuple[tuple[EmbeddingVariable, ...], tuple[Any, ...]]:
    """The embedding variables among `variables`, and all others, each in their order.

    Args:
      variables: a list or tuple, such as `jax.tree.leaves(nnx.state(model), is_leaf=...)`.

    Raises: ValueError: any other container.
    Source: Sparse Operation Kit, `sok.split_embedding_variable_from_others`.
    """
    if type(variables) not in (list, tuple):
        raise ValueError(
            f"variables must be a list or a tuple, got {type(variables).__name__}; for a model: "
            "[v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]."
        )
    embedding = tuple(v for v in variables if isinstance(v, EmbeddingVariable))
    return embedding, tuple(v for v in variables if not isinstance(v, EmbeddingVariable))
