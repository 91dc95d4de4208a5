"""`Init`, which says which devices share tables, and `EmbeddingVariable`: such a table as a variable of a model."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.bags import check_not_taken
from rsembed.checks import NonNegativeInt, PositiveInt, check_type, dtype_among, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.devices import Devices
from rsembed.fingerprint import check_same
from rsembed.initial_values import keyed_form
from rsembed.kernels.devices import check_threads
from rsembed.keys import KEY_DTYPES
from rsembed.optimizers import Adagrad, OptimizerSpec
from rsembed.parallel import runtime
from rsembed.specs import FeatureSpec, TableSpec
from rsembed.storage import Hashed, RowNumbers, Storage, hashed_rows


@dataclasses.dataclass(frozen=True)
class Context:
    """Devices that share tables, and the agreed size of the global batch.

    Attributes:
      mesh: all of its devices share the tables.
      global_batch_size: samples of all devices in a step; None takes any number that the devices divide.
    """

    mesh: Mesh
    global_batch_size: int | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices, which is the number of shards of every table."""
        return self.mesh.size

    @functools.cached_property
    def devices(self) -> Devices:
        """The devices as the core's `Devices`."""
        return Devices.of(self.mesh, None)

    def check_batch(self, num_samples: int, name: str) -> None:
        """Raises: ValueError: the samples of all processes do not add up to `global_batch_size`."""
        processes = self.devices.num_processes
        if self.global_batch_size not in (None, num_samples * processes):
            raise ValueError(
                f"{name}: {num_samples} samples in each of {processes} processes, but sok.Init was told "
                f"global_batch_size={self.global_batch_size}; change one of them, or leave it out to take any batch."
            )

    def place(self, tree: PyTree) -> PyTree:
        """Global arrays, split over all devices, from copies of this process's arrays."""
        sharding = self.devices.sharding(self.devices.split)
        place = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(place, jax.tree.map(np.array, tree))


_current: Context | None = None


@validated
def Init(global_batch_size: PositiveInt | None = None, *, mesh: Mesh | None = None, **distributed: Any) -> Context:
    """Connects the processes, if there are several, and chooses the devices that share tables.

    Call it once, before any layer is made; a second call changes what later layers get.

    Args:
      global_batch_size: samples of a step over all devices; buffers need it no longer, so it is only checked.
      mesh: the devices, along all of its axes; None takes all there are.
      **distributed: options of `parallel.init`.

    Raises: ValueError: the batch does not divide among the devices.
    Source: Sparse Operation Kit, `sok.Init`.

    Example:
      >>> from rsembed import sok
      >>> sok.Init(global_batch_size=64).num_devices in (1, 2, 4, 8)
      True
    """
    global _current
    runtime.init(**distributed)
    mesh = runtime.make_mesh() if mesh is None else mesh
    check_threads(mesh)
    context = Context(mesh, global_batch_size)
    if global_batch_size is not None and global_batch_size % context.num_devices:
        raise ValueError(
            f"sok.Init: global_batch_size={global_batch_size} does not divide among {context.num_devices} devices."
        )
    _current = context
    return context


_first_of_kind: dict[Hashable, VariableTable] = {}


@dataclasses.dataclass(frozen=True)
class VariableTable:
    """Description of a variable's table; its arrays are in the `EmbeddingState` that is the variable's value.

    Attributes:
      spec: the table of the core, kept as `Hashed` or as `RowNumbers`.
      context: the devices.
      when_full: treatment of new keys when a hash table is full; "grow" enlarges the table first.
      evict_option: which keys `EmbeddingVariable.evict` lets go unless it is told; None means none.
    """

    spec: TableSpec
    context: Context
    when_full: str | None = None
    evict_option: GlobalStepEvict | L2WeightEvict | None = None

    @property
    def rows_per_device(self) -> int:
        """Number of rows for which each device has room."""
        return self.spec.vocabulary_size // self.context.num_devices

    @functools.cached_property
    def collection(self) -> EmbeddingCollection:
        """The collection of this one table, whose methods take the variable's value."""
        feature = FeatureSpec(name=self.spec.name, table_spec=self.spec)
        return EmbeddingCollection([feature], mesh=self.context.mesh)

    @functools.cached_property
    def kind(self) -> VariableTable:
        """The first table that was equal to this one but for its name; both share compiled programs."""
        spec = self.spec
        sizes = spec.vocabulary_size, spec.embedding_dim, spec.dtype
        how = keyed_form(spec.initializer, spec.embedding_dim), spec.optimizer, spec.storage
        return _first_of_kind.setdefault((*sizes, *how, self.context.devices), self)

    def init(self, key: PRNGKeyArray) -> EmbeddingState:
        """Initial state: no rows with a hash table, else all of them; it keeps the key that new rows are drawn from."""
        state = self.collection.init(key)
        return state._replace(key=self.context.devices.place(key, PartitionSpec()))


class EmbeddingVariable(nnx.Variable):
    """A table over the devices: trained by its own optimizer, not by optax.

    Made by `embedding_variable`, and by the layers. Its `table` says what it is, and `table.collection` has the
    methods of the core for its value, an `EmbeddingState`.
    """

    @property
    def num_rows(self) -> int:
        """Number of keys that have a row, over all devices."""
        return int(self.counts()["rows"].sum())

    def counts(self) -> dict[str, np.ndarray]:
        """Counters of every device: `rows` in use, keys `inserted`, `evicted`, `failed`, ..."""
        return self.table.collection.counts(state_of(self))[self.table.spec.name]

    @validated
    def evict(
        self, option: GlobalStepEvict | L2WeightEvict | None = None, *, keep: NonNegativeInt | None = None
    ) -> dict[str, np.ndarray]:
        """Evicts keys and returns their rows; works outside of `jit` only.

        Args:
          option: which keys go; without it and `keep`, the `evict_option` that the table was made with decides.
          keep: number of keys that keep their rows, over all devices: those that `eviction` would evict last.

        Returns: the rows, as `export_rows` returns them; `assign_rows` brings them back.

        Raises:
          ValueError: nothing says who goes, or `keep` is negative.
          NotImplementedError: the table has no hash table.
          RuntimeError: this is inside `jit`.
        """
        table, name = self.table, self.table.spec.name
        if not isinstance(table.spec.storage, Hashed):
            raise NotImplementedError(f"table {name!r} has no hash table; its keys keep their rows.")
        option = table.evict_option if option is None and keep is None else option
        reasons = {} if option is None else option.reasons()
        if keep is None and not reasons:
            raise ValueError(
                f"evict from table {name!r}: pass keep=, sok.GlobalStepEvict(...) or sok.L2WeightEvict(...), or make "
                "the table with one of these in ev_option."
            )
        state, rows = table.collection.evict(state_of(self), name, keep=keep, **reasons)
        self.set_value(state)
        return rows


def state_of(variable: EmbeddingVariable) -> EmbeddingState:
    """The variable's state. Raises: ValueError: it is another table's. RuntimeError: a step took its arrays over."""
    state, name = variable.get_value(), variable.table.spec.name
    check_type(state, EmbeddingState, f"table {name!r}: its value")
    way_out = (
        "where an error or Ctrl-C broke that step off, make the layer anew and sok.load the latest dump; where a copy "
        "that shared the arrays took it, go on with the copy"
    )
    check_not_taken(state, f"table {name!r} has lost its rows", way_out)
    check_same(
        state.layout,
        variable.table.collection.layout,
        what=f"table {name!r} was given a state that is not its own",
        way_out="Take rows over by key, with export_rows and assign_rows, or with dump and load.",
    )
    for params in state.tables.values():
        cast(Storage, variable.table.spec.storage).check_params(params, variable.table.spec)
    return state


def make_larger(variable: EmbeddingVariable, rows_per_device: int) -> None:
    """Enlarges a hash table to this many rows on every device; as many keys can wait, unless their number was given."""
    table, state = variable.table, state_of(variable)
    name, devices, storage = table.spec.name, table.context.devices, cast(Hashed, table.spec.storage)
    num_waiting = storage.admission_capacity or rows_per_device

    def on_device(params: PyTree, slots: PyTree) -> PyTree:
        return hashed_rows.grow(params, slots, table.spec, rows_per_device, num_waiting)

    grow = jax.jit(devices.on_each(on_device, (devices.split, devices.split), (devices.split, devices.split)))
    params, slots = grow(state.tables[name], state.slots[name])
    spec = dataclasses.replace(table.spec, vocabulary_size=rows_per_device * devices.num_devices)
    variable.set_metadata(table=dataclasses.replace(table, spec=spec))
    layout = variable.table.collection.layout
    variable.set_value(state._replace(tables={name: params}, slots={name: slots}, layout=layout))


@dataclasses.dataclass(frozen=True)
@validated
class CounterFilter:
    """A key gets a row when it has occurred more than `filter_freq` times. Source: DeepRec, `tf.CounterFilter`."""

    filter_freq: int = 0


@dataclasses.dataclass(frozen=True)
@validated
class GlobalStepEvict:
    """Keys go that were not used for more than `steps_to_live` steps, also of those that wait for admission.

    Source: DeepRec, `tf.GlobalStepEvict`.
    """

    steps_to_live: NonNegativeInt | None = None

    def reasons(self) -> dict[str, float]:
        """Arguments of `EmbeddingCollection.evict`."""
        return {} if self.steps_to_live is None else {"unused_for": self.steps_to_live}


@dataclasses.dataclass(frozen=True)
@validated
class L2WeightEvict:
    """Keys go whose rows have less than this half of a squared L2 norm; none below 0.

    Source: DeepRec, `tf.L2WeightEvict`, whose pages say norm and whose code takes half of the sum of squares.
    """

    l2_weight_threshold: float = -1.0

    def reasons(self) -> dict[str, float]:
        """Arguments of `EmbeddingCollection.evict`."""
        return {} if self.l2_weight_threshold < 0 else {"norm_below": math.sqrt(2 * self.l2_weight_threshold)}


@dataclasses.dataclass(frozen=True)
@validated
class EmbeddingVariableOption:
    """Options of an embedding variable. Source: DeepRec, `tf.EmbeddingVariableOption`.

    Args:
      evict_option: which keys `variable.evict()` lets go; None keeps all.
      filter_option: which keys get rows; None admits every key at once.
    """

    evict_option: GlobalStepEvict | L2WeightEvict | None = None
    filter_option: CounterFilter | None = None


@validated
def embedding_variable(
    name: str,
    embedding_dim: int,
    *,
    rows_per_device: int,
    use_hashtable: bool = True,
    key_dtype: DTypeLike = "int64",
    initializer: str | float | Callable[..., Array] = "uniform",
    optimizer: OptimizerSpec | None = None,
    context: Context | None = None,
    rngs: nnx.Rngs | None = None,
    dtype: str = "float32",
    ev_option: EmbeddingVariableOption = EmbeddingVariableOption(),
    **policies: Any,
) -> EmbeddingVariable:
    """A table whose row of key `k` lies on device `k % n`.

    Args:
      name: unique in a model; the initial rows depend on it.
      embedding_dim: length of a row.
      rows_per_device: room for rows on each device.
      use_hashtable: keys of any size get rows when they are first stepped; else keys are row numbers below
        `rows_per_device * n`.
      key_dtype: int32, int64, uint32 or uint64.
      initializer: `(key, shape) -> array`, called for single rows; or "uniform" (from -0.05 to 0.05), "normal" (0.05),
        "truncated_normal", "zeros", "ones", or as the classes of Keras are called; or a number. A key's first row
        depends on `rngs`, the table's name and the key alone.
      optimizer: steps the rows that a batch looked up; None is Adagrad. `sok.optimizers` has those of the original.
      context: the devices; None means those of `Init`.
      rngs: its stream `params` seeds the table; None means `nnx.Rngs(0)`.
      dtype: of the rows: float32, bfloat16 or float16.
      ev_option: eviction and admission in DeepRec's form.
      **policies: `when_full`, `eviction`, `admission_count`, `admission_capacity` and `admission_probability` of a hash
        table: see `rsembed.Hashed`. Here `when_full="error"` raises in the lookup, before anything changes, and
        `when_full="grow"` makes the table larger before a step.

    Raises: ValueError: an argument is out of range. TypeError: it is unknown. RuntimeError: `Init` was not called.
    """
    where, context = f"table {name!r}", _current if context is None else context
    if context is None:
        raise RuntimeError("call sok.Init() first: it says which devices share the tables. Or pass context=.")
    check_type(rows_per_device, PositiveInt, f"{where}: rows_per_device")
    num_devices = context.num_devices
    if ev_option.filter_option is not None:
        if "admission_count" in policies:
            raise ValueError(f"{where}: ev_option and admission_count say the same; leave one of them out.")
        policies["admission_count"] = ev_option.filter_option.filter_freq
    unused = [*policies, *(["evict_option"] if ev_option.evict_option is not None else [])]
    when_full = policies.get("when_full", "error") if use_hashtable else None
    if when_full == "grow":
        policies["when_full"] = "error"  # until the variable has more room
    key_dtype = dtype_among(KEY_DTYPES, key_dtype, f"{where}: key_dtype")
    storage: Hashed | RowNumbers = Hashed(key_dtype=key_dtype, **policies)
    if not use_hashtable:
        if unused:
            raise ValueError(f"{where}: {', '.join(unused)} concern hash tables; use_hashtable is False.")
        storage = RowNumbers(key_dtype=key_dtype, num_shards=num_devices)
    spec = TableSpec(
        name=name,
        vocabulary_size=rows_per_device * num_devices,
        embedding_dim=embedding_dim,
        initializer=_named_initializer(initializer, name),
        optimizer=Adagrad() if optimizer is None else optimizer,
        dtype=dtype,
        storage=storage,
    )
    table = VariableTable(spec, context, when_full, ev_option.evict_option)
    key = (nnx.Rngs(0) if rngs is None else rngs).params()
    return EmbeddingVariable(table.init(key), table=table)


NAMED_INITIALIZERS: dict[str, Callable[..., Array]] = {
    "uniform": functools.partial(jax.random.uniform, dtype=jnp.float32, minval=-0.05, maxval=0.05),
    "normal": jax.nn.initializers.normal(0.05, jnp.float32),
    "truncated_normal": jax.nn.initializers.truncated_normal(0.05, jnp.float32),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}
"""Keras' names and scales; `random_uniform`, `RandomUniform` and so on mean the same."""


def _named_initializer(initializer: str | float | Callable[..., Array], table_name: str) -> Callable[..., Array]:
    """`(key, shape) -> array` from such a function, a name, or a number that all rows start from.

    Raises: ValueError: the name is unknown.
    """
    if callable(initializer):
        return initializer
    if not isinstance(initializer, str):
        return jax.nn.initializers.constant(initializer)
    known = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", initializer).lower().removeprefix("random_")
    if known in NAMED_INITIALIZERS:
        return NAMED_INITIALIZERS[known]
    raise ValueError(
        f"table {table_name!r}: unknown initializer {initializer!r}; choose one of {', '.join(NAMED_INITIALIZERS)}, or "
        "pass a number or a function of (key, shape). Rows for keys are made one by one: none may follow from the "
        "number of rows, as Glorot's do."
    )


def split_embedding_variable_from_others(
    variables: PyTree,
) -> tuple[tuple[EmbeddingVariable, ...], tuple[PyTree, ...]]:
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
