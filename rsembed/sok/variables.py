"""`Init`, which says which devices share tables, and `EmbeddingVariable`: such a table as a variable of a model."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.bags import check_not_taken
from rsembed.checks import NonNegativeInt, PositiveInt, check_type, check_within, dtype_among, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.devices import Devices
from rsembed.fingerprint import check_same
from rsembed.initial_values import keyed_form
from rsembed.kernels.devices import check_threads
from rsembed.keys import KEY_DTYPES
from rsembed.optimizers import Adagrad, OptimizerSpec
from rsembed.parallel import runtime
from rsembed.specs import FeatureSpec, TableSpec
from rsembed.storage import Hashed, RowNumbers, hashed_rows


@dataclasses.dataclass(frozen=True)
class Context:
    """Devices that share tables, and the agreed size of the global batch.

    Attributes:
      mesh: a mesh with one axis over them.
      axis: name of the mesh axis.
      global_batch_size: samples of all devices in a step; None takes any number that the devices divide.
    """

    mesh: Mesh
    axis: str
    global_batch_size: int | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices, which is the number of shards of every table."""
        return self.mesh.shape[self.axis]

    @functools.cached_property
    def devices(self) -> Devices:
        """The devices as the core's `Devices`."""
        return Devices.of(self.mesh, self.axis)

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
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axis))
        place = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(place, jax.tree.map(np.array, tree))


_current: Context | None = None


@validated
def Init(
    global_batch_size: PositiveInt | None = None, *, mesh: Mesh | None = None, axis: str = "shard", **distributed: Any
) -> Context:
    """Connects the processes, if there are several, and chooses the devices that share tables.

    Call it once, before any layer is made; a second call changes what later layers get.

    Args:
      global_batch_size: samples of a step over all devices; buffers need it no longer, so it is only checked.
      mesh: devices with an axis named `axis`, and no other; None takes all.
      axis: name of the mesh axis.
      **distributed: options of `parallel.init`.

    Raises: ValueError: the mesh has other axes, or the batch does not divide among its devices.
    Source: Sparse Operation Kit, `sok.Init`.

    Example:
      >>> from rsembed import sok
      >>> sok.Init(global_batch_size=64).num_devices in (1, 2, 4, 8)
      True
    """
    global _current
    runtime.init(**distributed)
    mesh = runtime.make_mesh(axis) if mesh is None else mesh
    if mesh.axis_names != (axis,):
        raise ValueError(f"sok.Init: the mesh must have the one axis {axis!r}, got {mesh.axis_names}; pass axis=.")
    check_threads(mesh)
    context = Context(mesh, axis, global_batch_size)
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
      exchange_capacity: see `EmbeddingCollection`.
      when_full: treatment of new keys when a hash table is full; "grow" enlarges the table first.
      steps_to_live: after how many steps without use a key is old; None means never.
      l2_weight_threshold: half a squared L2 norm below which a row is too small; None means never.
    """

    spec: TableSpec
    context: Context
    exchange_capacity: int | None = None
    when_full: str | None = None
    steps_to_live: int | None = None
    l2_weight_threshold: float | None = None

    @functools.cached_property
    def collection(self) -> EmbeddingCollection:
        """The collection of this one table, whose methods take the variable's value."""
        feature = FeatureSpec(name=self.spec.name, table_spec=self.spec)
        return EmbeddingCollection([feature], mesh=self.context.mesh, exchange_capacity=self.exchange_capacity)

    @functools.cached_property
    def kind(self) -> VariableTable:
        """The first table that was equal to this one but for its name; both share compiled programs."""
        spec = self.spec
        sizes = spec.vocabulary_size, spec.embedding_dim, spec.dtype, self.exchange_capacity
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
        self, *, keep: int | None = None, steps_to_live: int | None = None, l2_weight_threshold: float | None = None
    ) -> dict[str, np.ndarray]:
        """Evicts keys and returns their rows; works outside of `jit` only.

        Args:
          keep: number of keys that keep their rows, over all devices: those that `eviction` would evict last.
          steps_to_live: keys go that were not used in training for more than this many steps; those that wait for
            admission are no longer counted.
          l2_weight_threshold: keys go whose rows have less than this half of a squared L2 norm, as DeepRec has it.

        Without any of these, what the table was made with decides.

        Returns: the rows, as `export_rows` returns them; `assign_rows` brings them back.

        Raises:
          TypeError or ValueError: nothing says who goes, or a number is out of range.
          NotImplementedError: the table has no hash table.
          RuntimeError: this is inside `jit`.
        """
        table, name = self.table, self.table.spec.name
        if keep is None and steps_to_live is None and l2_weight_threshold is None:
            steps_to_live, l2_weight_threshold = table.steps_to_live, table.l2_weight_threshold
        if keep is None and steps_to_live is None and l2_weight_threshold is None:
            raise ValueError(
                f"table {name!r}: evict needs keep, steps_to_live or l2_weight_threshold; pass one, or make the table "
                "with one."
            )
        if not isinstance(table.spec.storage, Hashed):
            raise NotImplementedError(f"table {name!r} has no hash table; its keys keep their rows.")
        where = f"evict from table {name!r}"
        check_type(steps_to_live, NonNegativeInt | None, f"{where}: steps_to_live")
        check_within("[0, inf)", l2_weight_threshold, f"{where}: l2_weight_threshold")
        norm = None if l2_weight_threshold is None else math.sqrt(2 * l2_weight_threshold)
        state, rows = table.collection.evict(state_of(self), name, keep=keep, unused_for=steps_to_live, norm_below=norm)
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
    return state


def make_larger(variable: EmbeddingVariable, rows_per_device: int, num_waiting: int) -> None:
    """Enlarges a table to this many rows, and at least this many waiting keys, on every device."""
    table, state = variable.table, state_of(variable)
    name, devices, num_devices = table.spec.name, table.context.devices, table.context.num_devices
    waiting = state.tables[name].waiting
    num_places = num_waiting if waiting is None else waiting.last_step.shape[0] // num_devices
    if rows_per_device == table.spec.vocabulary_size // num_devices and num_waiting <= num_places:
        return

    def on_device(params: PyTree, slots: PyTree) -> PyTree:
        return hashed_rows.grow(params, slots, table.spec, rows_per_device, num_waiting)

    grow = jax.jit(devices.on_each(on_device, (devices.split, devices.split), (devices.split, devices.split)))
    params, slots = grow(state.tables[name], state.slots[name])
    storage = table.spec.storage
    if params.waiting is not None:
        storage = dataclasses.replace(storage, admission_capacity=params.waiting.last_step.shape[0] // num_devices)
    spec = dataclasses.replace(table.spec, vocabulary_size=rows_per_device * num_devices, storage=storage)
    variable.set_metadata(table=dataclasses.replace(table, spec=spec))
    layout = variable.table.collection.layout
    variable.set_value(state._replace(tables={name: params}, slots={name: slots}, layout=layout))


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """A key gets a row when it has occurred more than `filter_freq` times. Source: DeepRec, `tf.CounterFilter`."""

    filter_freq: int = 0


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """Keys go that were not used for more than `steps_to_live` steps. Source: DeepRec, `tf.GlobalStepEvict`."""

    steps_to_live: int | None = None


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """Keys go whose rows have less than this half of a squared L2 norm; none below 0.

    Source: DeepRec, `tf.L2WeightEvict`, whose pages say norm and whose code takes half of the sum of squares.
    """

    l2_weight_threshold: float = -1.0


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

    def as_policies(self) -> dict[str, float]:
        """Arguments of `embedding_variable` that ask for what these options ask for."""
        evict, admit = self.evict_option, self.filter_option
        said: dict[str, float] = {} if admit is None else {"admission_count": admit.filter_freq}
        if isinstance(evict, GlobalStepEvict) and evict.steps_to_live is not None:
            said["steps_to_live"] = evict.steps_to_live
        if isinstance(evict, L2WeightEvict) and evict.l2_weight_threshold >= 0:
            said["l2_weight_threshold"] = evict.l2_weight_threshold
        return said


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
    exchange_capacity: PositiveInt | None = None,
    context: Context | None = None,
    rngs: nnx.Rngs | None = None,
    dtype: str = "float32",
    ev_option: EmbeddingVariableOption | None = None,
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
        "truncated_normal", "zeros", "ones", by any name that Keras has for them; or a number. A key's first row depends
        on `rngs`, the table's name and the key alone.
      optimizer: steps the rows that a batch looked up; None is Adagrad. `sok.optimizers` has those of the original.
      exchange_capacity: see `EmbeddingCollection`.
      context: the devices; None means those of `Init`.
      rngs: its stream `params` seeds the table; None means `nnx.Rngs(0)`.
      dtype: of the rows: float32, bfloat16 or float16.
      ev_option: eviction and admission in DeepRec's form.
      **policies: `when_full`, `eviction`, `admission_count`, `admission_capacity` and `admission_probability` of a hash
        table: see `rsembed.Hashed`. Here `when_full="error"` raises in the lookup, before anything changes, and
        `when_full="grow"` makes the table larger before a step. By the names of SOK, `evict_strategy` ("LRU" or "LFU",
        evicts when full) and `filter_ratio` (the probability). `steps_to_live` and `l2_weight_threshold` are those of
        `EmbeddingVariable.evict`; None keeps all.

    Raises: ValueError: an argument is out of range. TypeError: it is unknown. RuntimeError: `Init` was not called.
    """
    where, context = f"table {name!r}", _current if context is None else context
    if context is None:
        raise RuntimeError("call sok.Init() first: it says which devices share the tables. Or pass context=.")
    check_type(rows_per_device, PositiveInt, f"{where}: rows_per_device")
    num_devices = context.num_devices
    policies = _core_policies(where, ev_option, policies)
    unused = [] if use_hashtable else list(policies)
    steps_to_live, l2_weight_threshold = policies.pop("steps_to_live", None), policies.pop("l2_weight_threshold", None)
    check_type(steps_to_live, NonNegativeInt | None, f"{where}: steps_to_live")
    check_within("[0, inf)", l2_weight_threshold, f"{where}: l2_weight_threshold")
    when_full = policies.get("when_full", "error") if use_hashtable else None
    if when_full == "grow":
        policies = policies | {"when_full": "error"}  # until the variable has more room
    key_dtype = dtype_among(KEY_DTYPES, key_dtype, f"{where}: key_dtype")
    storage: Hashed | RowNumbers = Hashed(key_dtype=key_dtype, **policies)
    if unused:
        raise ValueError(f"{where}: {', '.join(unused)} concern hash tables; use_hashtable is False.")
    if not use_hashtable:
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
    table = VariableTable(spec, context, exchange_capacity, when_full, steps_to_live, l2_weight_threshold)
    key = (nnx.Rngs(0) if rngs is None else rngs).params()
    return EmbeddingVariable(table.init(key), table=table)


def _core_policies(where: str, option: EmbeddingVariableOption | None, policies: Mapping[str, Any]) -> dict[str, Any]:
    """Policies by the names of `embedding_variable` and `rsembed.Hashed`, from those and from the published ones.

    Raises: ValueError: a strategy has no counterpart, or two arguments say the same.
    """
    policies = dict(policies)
    published: dict[str, dict[str, Any]] = {"ev_option": {} if option is None else option.as_policies()}
    if (strategy := policies.pop("evict_strategy", None)) is not None:
        published["evict_strategy"] = {"when_full": "evict", "eviction": str(strategy).lower()}
        if str(strategy).lower() not in ("lru", "lfu"):
            raise ValueError(f"{where}: evict_strategy {strategy!r} has no counterpart; choose 'LRU' or 'LFU'.")
    if (ratio := policies.pop("filter_ratio", None)) is not None:
        published["filter_ratio"] = {"admission_probability": ratio}
    for source, own in published.items():
        if both := sorted(set(policies) & set(own)):
            raise ValueError(f"{where}: {source} says what {', '.join(both)} says, too; leave one of them out.")
        policies |= own
    return policies


NAMED_INITIALIZERS: dict[str, Callable[..., Array]] = {
    "uniform": functools.partial(jax.random.uniform, dtype=jnp.float32, minval=-0.05, maxval=0.05),
    "normal": jax.nn.initializers.normal(0.05, jnp.float32),
    "truncated_normal": jax.nn.initializers.truncated_normal(0.05, jnp.float32),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}
"""Keras' names and scales; `random_uniform`, `RandomUniform`, SOK's `random` and so on mean the same."""
_ALIASES = {"random": "uniform", "zero": "zeros", "one": "ones"}


def _named_initializer(initializer: str | float | Callable[..., Array], table_name: str) -> Callable[..., Array]:
    """`(key, shape) -> array` from such a function, a name, or a number that all rows start from, also as a text.

    Raises: ValueError: the name is unknown.
    """
    if callable(initializer):
        return initializer
    given = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(initializer)).lower()
    known = given.removeprefix("random_")
    known = _ALIASES.get(known, known)
    if known in NAMED_INITIALIZERS:
        return NAMED_INITIALIZERS[known]
    try:
        return jax.nn.initializers.constant(float(given))
    except ValueError:
        pass
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
