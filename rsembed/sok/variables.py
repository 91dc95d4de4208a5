"""`EmbeddingVariable`: a table over the devices as a variable of a model, looked up and trained in groups."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import Array

from rsembed.collection.stored_table import Trip, keys_of
from rsembed.fingerprint import check_same
from rsembed.homes import hashed_rows
from rsembed.homes.hashed_rows import DynamicTableSpec, numbers_of
from rsembed.homes.home import on_host
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import join_keys
from rsembed.optimizers import AdagradOptimizerSpec, OptimizerSpec
from rsembed.sok import sharded_table
from rsembed.sok.initialize import Context, current_context
from rsembed.sok.sharded_table import KeyBags, ShardedTable, TableState

_look_up = jax.jit(sharded_table.look_up, static_argnums=0, donate_argnums=1)
_evaluate = jax.jit(sharded_table.evaluate, static_argnums=0)
_update = jax.jit(sharded_table.update, static_argnums=0, donate_argnums=1)

NAMED_INITIALIZERS: dict[str, Callable[..., Array]] = {
    "uniform": hashed_rows.uniform_initializer,
    "normal": lambda key, shape: 0.05 * jax.random.normal(key, shape, jnp.float32),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}
"""Keras' names and scales; `random_uniform` and `random_normal` mean the same."""


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
        return hashed_rows.counts(self.get_value().shards, self.table.context.num_devices)

    def evict_older(self) -> None:
        """Frees the rows of keys that were not trained for `steps_to_live` steps; see `hashed_rows.evict_older`."""
        self.set_value(_evict_older(self.table, state_of(self)))

    def grow(self, rows_per_device: int) -> None:
        """Makes room for more rows; programs that use the variable are compiled anew.

        Raises:
          ValueError: it has more rows already.
          NotImplementedError: it has no hash table.
        """
        if not self.table.use_hashtable:
            raise NotImplementedError(f"table {self.table.spec.name!r} has no hash table; its size is fixed.")
        self.set_value(grown(self.table, state_of(self), rows_per_device))


def state_of(variable: EmbeddingVariable) -> TableState:
    """The variable's value. Raises: ValueError: it is the state of another table."""
    state: TableState = variable.get_value()
    check_same(
        state.layout,
        variable.table.layout,
        what=f"table {variable.table.spec.name!r} was given a state that is not its own",
        way_out="Take rows over by key, with export_rows and assign_rows, or with dump and load.",
    )
    return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _evict_older(table: ShardedTable, state: TableState) -> TableState:
    return table.on_shards(lambda shard, step: hashed_rows.evict_older(table.spec, shard, step), state)


@functools.partial(jax.jit, static_argnums=(0, 2))
def grown(table: ShardedTable, state: TableState, capacity: int) -> TableState:
    """The state with room for `capacity` rows on every device."""
    return table.on_shards(lambda shard, step: hashed_rows.grow(table.spec, shard, capacity), state)


def embedding_variable(
    name: str,
    embedding_dim: int,
    *,
    rows_per_device: int,
    use_hashtable: bool = True,
    key_dtype: str = "int64",
    initializer: str | Callable[..., Array] = "uniform",
    optimizer: OptimizerSpec | None = None,
    exchange_capacity: int | None = None,
    context: Context | None = None,
    rngs: nnx.Rngs | None = None,
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
        "zeros", "ones". A key's first row depends on `rngs`, the table's name and the key alone.
      optimizer: steps the rows that a batch looked up; None is Adagrad. `sok.optimizers` has those of the original.
      exchange_capacity: places per block of the exchange, see `parallel.rounds.ask`; None sizes it for one round.
      context: the devices; None means those of `Init`.
      rngs: its stream `params` seeds the table; None means `nnx.Rngs(0)`.
      **policies: what happens when a table is full, admission, eviction: see `DynamicTableSpec`. Also `dtype`.

    Raises: ValueError: an argument is out of range or unknown.
    """
    context = current_context(context)
    of_keys = [policy for policy in policies if policy != "dtype"]
    if of_keys and not use_hashtable:
        raise ValueError(f"table {name!r}: {', '.join(of_keys)} concern hash tables; use_hashtable is False.")
    if not use_hashtable and rows_per_device * context.num_devices > 2**32:
        raise ValueError(
            f"table {name!r}: {rows_per_device} rows on each of {context.num_devices} devices are more than 2**32; "
            "take use_hashtable=True."
        )
    spec = DynamicTableSpec(
        name=name,
        embedding_dim=embedding_dim,
        capacity=rows_per_device,
        key_dtype=key_dtype,
        optimizer=AdagradOptimizerSpec() if optimizer is None else optimizer,
        initializer=_initializer(initializer, name),
        **policies,
    )
    table = ShardedTable(spec, context, use_hashtable, exchange_capacity)
    key = (nnx.Rngs(0) if rngs is None else rngs).params()
    return EmbeddingVariable(table.init(key), table=table)


def _initializer(initializer: Any, name: str) -> Callable[..., Array]:
    if callable(initializer):
        return initializer
    known = str(initializer).removeprefix("random_")
    if known not in NAMED_INITIALIZERS:
        raise ValueError(
            f"table {name!r}: unknown initializer {initializer!r}; choose one of {', '.join(NAMED_INITIALIZERS)}, or "
            "pass a function of (key, shape)."
        )
    return NAMED_INITIALIZERS[known]


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


@dataclasses.dataclass(eq=False)
class Backward:
    """Trains the tables of a lookup with the gradients of its outputs, once."""

    variables: Sequence[EmbeddingVariable]
    trips: Sequence[Trip]
    order: Sequence[int]  # which of the variables each output comes from
    shapes: list[tuple[int, ...]]
    is_done: bool = False

    def __call__(self, *d_outputs: Any) -> None:
        """One optimizer step of every row that the lookup read.

        Args:
          *d_outputs: gradient of each output; of the loss over the global batch.

        Raises:
          RuntimeError: a second call.
          ValueError: a gradient has another shape than its output.
        """
        if self.is_done:
            raise RuntimeError("backward was called before: a lookup trains once. Look up again for another step.")
        if len(d_outputs) != len(self.shapes):
            raise ValueError(f"the lookup has {len(self.shapes)} outputs, but {len(d_outputs)} gradients came.")
        gradients: list[list[Array]] = [[] for _ in self.variables]
        for number, d_output, shape in zip(self.order, d_outputs, self.shapes, strict=True):
            gradient, name = jnp.asarray(d_output), self.variables[number].table.spec.name
            if gradient.shape != shape:
                raise ValueError(f"table {name!r}: the gradient has shape {gradient.shape}, the output {shape}.")
            gradients[number].append(gradient.astype(jnp.float32).reshape(-1, shape[-1]))
        tables, states = _tables_and_states(self.variables)
        for variable, state in zip(self.variables, _update(tables, states, self.trips, gradients), strict=True):
            variable.set_value(state)
        self.is_done = True


def look_up_variables(
    variables: Sequence[EmbeddingVariable], batch: Sequence[KeyBags], *, training: bool
) -> tuple[list[Array], Backward]:
    """Rows of several features in one program, and the function that trains their tables.

    Args:
      variables: the table of each feature; features may share one.
      batch: keys of each feature.
      training: new keys get rows.

    Raises: RuntimeError: a table is full and its policy is to say so. Inside `jit` the `counts` say it.
    """
    if not variables:
        return [], Backward((), (), (), [])
    own_variables = list({id(variable): variable for variable in variables}.values())
    numbers = {id(variable): number for number, variable in enumerate(own_variables)}
    order = [numbers[id(variable)] for variable in variables]
    own_batch: list[list[KeyBags]] = [[] for _ in own_variables]
    for number, bags in zip(order, batch, strict=True):
        own_batch[number].append(_placed(bags, own_variables[number].table.context))

    tables, states = _tables_and_states(own_variables)
    is_eager = not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((own_batch, states)))
    if training and is_eager:
        for variable, features in zip(own_variables, own_batch, strict=True):
            _make_room(variable, features)
        failed = [_num_failed(variable) for variable in own_variables]
        states = [variable.get_value() for variable in own_variables]
    trips: list[Trip] = []
    if training:
        results = _look_up(tables, states, own_batch)
        for variable, (state, _, trip) in zip(own_variables, results, strict=True):
            variable.set_value(state)
            trips.append(trip)
        found_by_table = [iter(own) for _, own, _ in results]
    else:
        looked_at = _evaluate(tables, states, own_batch)
        for variable, state, (counters, _) in zip(own_variables, states, looked_at, strict=True):
            with contextlib.suppress(TraceContextError):
                variable.set_value(state._replace(shards=state.shards._replace(counters=counters)))
        found_by_table = [iter(own) for _, own in looked_at]
    if training and is_eager:
        for variable, before, trip in zip(own_variables, failed, trips, strict=True):
            _check_room(variable, before, trip)
    outputs = [next(found_by_table[number]) for number in order]
    return outputs, Backward(own_variables, trips, order, [output.shape for output in outputs])


def _tables_and_states(variables: Sequence[EmbeddingVariable]) -> tuple[tuple[ShardedTable, ...], list[TableState]]:
    return tuple(variable.table for variable in variables), [state_of(variable) for variable in variables]


def _placed(bags: KeyBags, context: Context) -> KeyBags:
    """The batch on the devices of the table, where it is not there already."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(bags)):
        return bags
    placed: KeyBags = context.place(bags)
    return placed


def _make_room(variable: EmbeddingVariable, features: Sequence[KeyBags]) -> None:
    """Grows a table that may, so that all new keys of the batch find a row."""
    table, state = variable.table, variable.get_value()
    if not table.use_hashtable or table.spec.when_full != "grow":
        return
    maps = [rows for rows in (state.shards.keys, state.shards.waiting) if rows is not None]
    num_free = min(int(on_host(rows.num_free).min()) for rows in maps)
    if num_free >= sum(feature.keys.is_key.size for feature in features):
        return
    ((counters, _),) = _evaluate((table,), [state], [features])
    num_new = numbers_of(counters.unknown) - numbers_of(state.shards.counters.unknown)
    if num_new.max() > num_free:
        old = state.shards.rows.shape[0] // table.context.num_devices
        variable.grow(max(2 * old, old - num_free + int(num_new.max())))


def _num_failed(variable: EmbeddingVariable) -> int:
    if not variable.table.use_hashtable or variable.table.spec.when_full == "zero":
        return 0  # nobody asks, so that nobody waits for the device either
    return int(numbers_of(variable.get_value().shards.counters.failed).sum())


def _check_room(variable: EmbeddingVariable, failed_before: int, trip: Trip) -> None:
    spec, num_failed = variable.table.spec, _num_failed(variable) - failed_before
    if not num_failed:
        return
    keys = trip.batch.keys if trip.wanted is None else keys_of(trip.wanted)
    lost = on_host(keys.is_key & (trip.rows == NO_ROW))
    place = int(lost.argmax())
    (key,) = join_keys(*(on_host(lane)[place : place + 1] for lane in (keys.high, keys.low)))
    raise RuntimeError(
        f"table {spec.name!r} is full: {num_failed} new keys found no room, among them {key}; the devices use "
        f"{variable.counts()['rows'].tolist()} rows. They read as zeros and are not trained; nothing else was lost. "
        "Make max_vocabulary_size_per_gpu (or admission_capacity) larger, or choose when_full='grow', 'evict' (which "
        "spares the rows of the same step) or 'zero'."
    )
