"""`Init`, which chooses the devices that share tables, and `EmbeddingVariable`, a sharded table."""

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
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.arrays import check_not_taken
from rsembed.checks import NonNegativeInt, PositiveInt, check_type, dtype_among, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.devices import Devices
from rsembed.collection.host_stack import KeyedStack
from rsembed.fingerprint import check_same
from rsembed.initial_values import keyed_form, table_keys
from rsembed.kernels.devices import check_threads
from rsembed.keys import KEY_DTYPES
from rsembed.optimizers import Adagrad, OptimizerSpec
from rsembed.parallel import runtime
from rsembed.specs import FeatureSpec, TableSpec
from rsembed.storage import Hashed, RowNumbers, Storage, hashed_rows
from rsembed.storage.protocol import Params, SlotTree, State


@dataclasses.dataclass(frozen=True)
class Context:
    """Devices that share tables, and the size of the global batch.

    Attributes:
      mesh: mesh of the devices. Tables are sharded over all axes of the mesh.
      global_batch_size: number of samples per step on all devices, by default any multiple of the
        number of devices.
    """

    mesh: Mesh
    global_batch_size: int | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices, which is also the number of shards of every table."""
        return self.mesh.size

    @functools.cached_property
    def devices(self) -> Devices:
        """The devices as a `Devices` object."""
        return Devices.of(self.mesh, None)

    def check_batch(self, num_samples: int, name: str) -> None:
        """Checks the batch size of this process, if `Init` was called with a global batch size.

        Args:
          num_samples: number of samples in this process.
          name: name of the layer in the error message.

        Raises: ValueError: the processes together do not have `global_batch_size` samples.
        """
        num_processes = self.devices.num_processes
        if self.global_batch_size not in (None, num_samples * num_processes):
            raise ValueError(
                f"{name}: {num_samples} samples in each of {num_processes} processes, but sok.Init "
                f"was told global_batch_size={self.global_batch_size}; change one of them, or "
                "leave it out to take any batch."
            )

    def place(self, tree: PyTree) -> PyTree:
        """Copies the arrays of each process into global arrays, sharded over all devices."""
        sharding = self.devices.sharding(self.devices.split)

        def place_copy(array: ArrayLike) -> jax.Array:
            return jax.make_array_from_process_local_data(sharding, np.array(array))

        return jax.tree.map(place_copy, tree)


_current: Context | None = None


@validated
def Init(
    global_batch_size: PositiveInt | None = None,
    *,
    mesh: Mesh | None = None,
    **distributed: Any,
) -> Context:
    """Connects the processes of a run, and chooses the devices that share tables.

    Call `Init` once, before the first layer. A second call of `Init` affects only layers that are
    made after it.

    Args:
      global_batch_size: number of samples per step on all devices. A lookup raises ValueError for a
        batch of a different size, unless the batch is traced or global. By default, batches may
        have any size.
      mesh: mesh of the devices that share tables, by default a mesh of all devices.
      **distributed: options of `parallel.init`.

    Raises: ValueError: `global_batch_size` is not a multiple of the number of devices.

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
        problem = f"does not divide among {context.num_devices} devices"
        raise ValueError(f"sok.Init: global_batch_size={global_batch_size} {problem}.")
    _current = context
    return context


_first_of_kind: dict[Hashable, VariableTable] = {}


@dataclasses.dataclass(frozen=True)
class VariableTable:
    """Description of the table of an `EmbeddingVariable`.

    The rows and the optimizer state of the table are in the value of the variable.

    Attributes:
      spec: spec of the table, with storage `Hashed` or `RowNumbers`.
      context: devices that share the table.
      when_full: policy for new keys of a full hash table, see `embedding_variable`. None if the
        table is not a hash table.
      evict_option: rule that selects the keys that `EmbeddingVariable.evict` evicts by default, or
        None.
    """

    spec: TableSpec
    context: Context
    when_full: str | None = None
    evict_option: GlobalStepEvict | L2WeightEvict | None = None

    @property
    def rows_per_device(self) -> int:
        """Number of rows of the table on each device, used or free."""
        return self.spec.vocabulary_size // self.context.num_devices

    @functools.cached_property
    def collection(self) -> EmbeddingCollection:
        """An `EmbeddingCollection` with only this table.

        To call a method of the collection, pass the value of the `EmbeddingVariable` as its state.
        """
        feature = FeatureSpec(name=self.spec.name, table_spec=self.spec)
        return EmbeddingCollection([feature], mesh=self.context.mesh)

    @functools.cached_property
    def kind(self) -> VariableTable:
        """Table that represents all tables that share compiled programs with this table.

        Tables that differ only in their names share compiled programs. Among the tables that share
        compiled programs, `kind` is the table on which this process first read the property `kind`.
        """
        spec = self.spec
        key = (
            spec.vocabulary_size,
            spec.embedding_dim,
            spec.dtype,
            keyed_form(spec.initializer, spec.embedding_dim),
            spec.optimizer,
            spec.storage,
            self.context.devices,
        )
        return _first_of_kind.setdefault(key, self)

    def init(self, key: PRNGKeyArray) -> EmbeddingState:
        """Initial state of the table.

        A hash table starts without keys. A table without a hash table starts with the initial
        values of all rows, which depend on `key`.
        """
        name = self.spec.name
        # Tables of a kind share the compiled program, which does not contain their names.
        init_from_keys = stack_of(self.kind).init_from_keys
        params, slots = init_from_keys(table_keys(key, [name]))
        stack_of(self).check_start(params, slots)
        step = jnp.zeros((), jnp.int32)
        step, key = self.context.devices.place((step, key), PartitionSpec())
        return EmbeddingState({name: params}, {name: slots}, step, key, self.collection.layout)


def stack_of(table: VariableTable) -> KeyedStack:
    """The stack of `table.collection`, which has only this table."""
    return cast(KeyedStack, table.collection.logical.stacks[table.spec.name])


class EmbeddingVariable(nnx.Variable):
    """A sharded embedding table as an `nnx.Variable` of a model.

    `backward` of a lookup updates the rows with the optimizer of the table. Do not pass the
    variable to optax.

    Call `embedding_variable` or a layer to make an `EmbeddingVariable`. The attribute `table` is a
    `VariableTable`. The value of the variable is an `EmbeddingState`. `table.collection` is an
    `EmbeddingCollection` that accepts the value of the variable as its state.
    """

    @property
    def num_rows(self) -> int:
        """Number of keys that have a row, on all devices together."""
        return int(self.counts()["rows"].sum())

    def counts(self) -> dict[str, np.ndarray]:
        """Counters by name, with one number per device, such as the number of `inserted` keys."""
        return self.table.collection.counts(state_of(self))[self.table.spec.name]

    @validated
    def evict(
        self,
        option: GlobalStepEvict | L2WeightEvict | None = None,
        *,
        keep: NonNegativeInt | None = None,
    ) -> dict[str, np.ndarray]:
        """Evicts keys, and returns the evicted rows. Call `evict` only outside `jit`.

        Args:
          option: rule that selects the keys to evict. If `option` and `keep` are None, the
            `evict_option` of the table is used.
          keep: maximum number of keys that stay in the table, counted over all devices. The
            table's `eviction` policy decides which keys are evicted first.

        Returns: the evicted rows, as a dictionary of the form that `export_rows` returns. Pass the
          dictionary to `assign_rows` to restore the rows.

        Raises:
          ValueError: neither `keep`, `option` nor the table's `evict_option` selects keys to evict,
            or `keep` is negative.
          NotImplementedError: the table is not a hash table.
          RuntimeError: the call is inside `jit`.
        """
        table = self.table
        name = table.spec.name
        if not isinstance(table.spec.storage, Hashed):
            problem = "has no hash table; its keys keep their rows"
            raise NotImplementedError(f"table {name!r} {problem}.")
        if option is None and keep is None:
            option = table.evict_option
        reasons = {} if option is None else option.reasons()
        if keep is None and not reasons:
            raise ValueError(
                f"evict from table {name!r}: pass keep=, sok.GlobalStepEvict(...) or "
                "sok.L2WeightEvict(...), or make the table with one of these in ev_option."
            )
        state, rows = table.collection.evict(state_of(self), name, keep=keep, **reasons)
        self.set_value(state)
        return rows


def state_of(variable: EmbeddingVariable) -> EmbeddingState:
    """Checks that a variable's state belongs to its table, and returns the state.

    Raises:
      ValueError: the state belongs to a different table.
      RuntimeError: the arrays of the state were donated to a step.
    """
    state = variable.get_value()
    name = variable.table.spec.name
    check_type(state, EmbeddingState, f"table {name!r}: its value")
    way_out = (
        "where an error or Ctrl-C broke that step off, make the layer anew and sok.load the latest "
        "dump; where a copy that shared the arrays took it, go on with the copy"
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
    """Enlarges a hash table.

    Unless the table has an `admission_capacity`, the list of keys that wait for admission gets the
    same size as the table.

    Args:
      variable: the variable. The table must be a hash table.
      rows_per_device: new number of rows on each device.
    """
    table = variable.table
    name = table.spec.name
    state = state_of(variable)
    devices = table.context.devices
    storage = cast(Hashed, table.spec.storage)
    num_waiting = storage.admission_capacity or rows_per_device

    def on_device(params: Params, slots: SlotTree) -> State:
        return hashed_rows.grow(params, slots, table.spec, rows_per_device, num_waiting)

    shards = (devices.split, devices.split)
    grow = jax.jit(devices.on_each(on_device, shards, shards))
    params, slots = grow(state.tables[name], state.slots[name])
    spec = dataclasses.replace(table.spec, vocabulary_size=rows_per_device * devices.num_devices)
    variable.set_metadata(table=dataclasses.replace(table, spec=spec))
    larger_state = state._replace(
        tables={name: params},
        slots={name: slots},
        layout=variable.table.collection.layout,
    )
    variable.set_value(larger_state)


@dataclasses.dataclass(frozen=True)
@validated
class CounterFilter:
    """Admission rule: a key gets a row once it has occurred more than `filter_freq` times.

    Source: DeepRec, `tf.CounterFilter`.
    """

    filter_freq: int = 0


@dataclasses.dataclass(frozen=True)
@validated
class GlobalStepEvict:
    """Eviction rule: keys that were not used for more than `steps_to_live` steps are evicted.

    The rule applies to keys with a row and to keys that wait for admission. If `steps_to_live` is
    None, no key is evicted.

    Source: DeepRec, `tf.GlobalStepEvict`.
    """

    steps_to_live: NonNegativeInt | None = None

    def reasons(self) -> dict[str, float]:
        """Keyword arguments for `EmbeddingCollection.evict`, empty if the rule evicts no key."""
        if self.steps_to_live is None:
            return {}
        return {"unused_for": self.steps_to_live}


@dataclasses.dataclass(frozen=True)
@validated
class L2WeightEvict:
    """Eviction rule: keys of rows with a small L2 norm are evicted.

    A key is evicted if half the squared L2 norm of the key's row is below `l2_weight_threshold`.
    With a negative `l2_weight_threshold`, no key is evicted.

    Source: DeepRec, `tf.L2WeightEvict`. DeepRec's documentation says that the threshold is compared
      with `norm`, but DeepRec's code compares the threshold with `norm**2 / 2`.
    """

    l2_weight_threshold: float = -1.0

    def reasons(self) -> dict[str, float]:
        """Keyword arguments for `EmbeddingCollection.evict`, empty if the rule evicts no key."""
        if self.l2_weight_threshold < 0:
            return {}
        return {"norm_below": math.sqrt(2 * self.l2_weight_threshold)}


@dataclasses.dataclass(frozen=True)
@validated
class EmbeddingVariableOption:
    """Options of an embedding variable.

    Args:
      evict_option: rule that selects the keys that `variable.evict()` evicts by default.
      filter_option: rule that selects the keys that get rows. By default, every key gets a row when
        it is first trained.

    Source: DeepRec, `tf.EmbeddingVariableOption`.
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
    """A table that is sharded over `n` devices: device `k % n` has the row of key `k`.

    Args:
      name: name of the table, unique in a model. The initial rows depend on the name.
      embedding_dim: number of columns.
      rows_per_device: number of rows on each device.
      use_hashtable: if True, the default, keys are any integers, and a key gets a row in its first
        training step. If False, keys are row numbers from 0 to `rows_per_device * n - 1`.
      key_dtype: dtype of the keys: int32, int64 (the default), uint32 or uint64.
      initializer: a number, a name, or a function `(key, shape) -> array` that is called with the
        shape `(1, dim)` for each row. Names are "uniform" (from -0.05 to 0.05), "normal" (standard
        deviation 0.05), "truncated_normal", "zeros", "ones", and Keras class names such as
        `RandomUniform`. The initial row of a key depends only on `rngs`, the name of the table and
        the key.
      optimizer: optimizer that updates the looked-up rows, by default Adagrad. TensorFlow's
        variants of Adam are in `sok.optimizers`.
      context: devices that share the table, by default the devices that `Init` chose.
      rngs: random streams, by default `nnx.Rngs(0)`. The PRNG key of the initial rows comes from
        the stream `params`.
      dtype: dtype of the rows: float32, bfloat16 or float16.
      ev_option: DeepRec's options for eviction and admission.
      **policies: `when_full`, `eviction`, `admission_count`, `admission_capacity` and
        `admission_probability` of a hash table, see `rsembed.Hashed`. The value "error" of
        `when_full` has a different effect than in `rsembed.Hashed`: if the table has too few free
        rows, the lookup of a training step raises an error and leaves all tables unchanged. The
        value "grow" of `when_full`, which `rsembed.Hashed` does not accept, enlarges a table with
        too few free rows before the step.

    Raises:
      ValueError: an argument is out of range.
      TypeError: an argument is unknown.
      RuntimeError: `sok.Init` has not been called.
    """
    where = f"table {name!r}"
    if context is None:
        context = _current
    if context is None:
        why = "it says which devices share the tables"
        raise RuntimeError(f"call sok.Init() first: {why}. Or pass context=.")
    check_type(rows_per_device, PositiveInt, f"{where}: rows_per_device")
    num_devices = context.num_devices
    if ev_option.filter_option is not None:
        if "admission_count" in policies:
            way_out = "leave one of them out"
            raise ValueError(f"{where}: ev_option and admission_count say the same; {way_out}.")
        policies["admission_count"] = ev_option.filter_option.filter_freq
    hash_options = list(policies)
    if ev_option.evict_option is not None:
        hash_options.append("evict_option")
    when_full = policies.get("when_full", "error") if use_hashtable else None
    if when_full == "grow":
        # A `Hashed` storage does not support "grow". Before a step, `make_larger` enlarges a table
        # with too few free rows.
        policies["when_full"] = "error"
    key_dtype = dtype_among(KEY_DTYPES, key_dtype, f"{where}: key_dtype")
    storage: Hashed | RowNumbers = Hashed(key_dtype=key_dtype, **policies)
    if not use_hashtable:
        if hash_options:
            names = ", ".join(hash_options)
            raise ValueError(f"{where}: {names} concern hash tables; use_hashtable is False.")
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
    if rngs is None:
        rngs = nnx.Rngs(0)
    return EmbeddingVariable(table.init(rngs.params()), table=table)


NAMED_INITIALIZERS: dict[str, Callable[..., Array]] = {
    "uniform": functools.partial(
        jax.random.uniform,
        dtype=jnp.float32,
        minval=-0.05,
        maxval=0.05,
    ),
    "normal": jax.nn.initializers.normal(0.05, jnp.float32),
    "truncated_normal": jax.nn.initializers.truncated_normal(0.05, jnp.float32),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}
"""Initializers with Keras' names and scales.

`embedding_variable` accepts each name in CamelCase or with the prefix `random_`, as in
`RandomUniform` and `random_uniform`.
"""


def _named_initializer(
    initializer: str | float | Callable[..., Array],
    table_name: str,
) -> Callable[..., Array]:
    """Initializer `(key, shape) -> array` from a function, a name or a number.

    Raises: ValueError: the name is unknown.
    """
    if callable(initializer):
        return initializer
    if not isinstance(initializer, str):
        return jax.nn.initializers.constant(initializer)
    snake_case = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", initializer).lower()
    name = snake_case.removeprefix("random_")
    if name in NAMED_INITIALIZERS:
        return NAMED_INITIALIZERS[name]
    raise ValueError(
        f"table {table_name!r}: unknown initializer {initializer!r}; choose one of "
        f"{', '.join(NAMED_INITIALIZERS)}, or pass a number or a function of (key, shape). Rows "
        "for keys are made one by one: none may follow from the number of rows, as Glorot's do."
    )


def split_embedding_variable_from_others(
    variables: PyTree,
) -> tuple[tuple[EmbeddingVariable, ...], tuple[object, ...]]:
    """Separates the embedding variables in a list from all other entries of the list.

    Args:
      variables: a list or tuple, such as `jax.tree.leaves(nnx.state(model), is_leaf=...)`.

    Returns: a tuple of the embedding variables and a tuple of the other entries, each in the order
      of `variables`.

    Raises: ValueError: `variables` is neither a list nor a tuple.

    Source: Sparse Operation Kit, `sok.split_embedding_variable_from_others`.
    """
    if type(variables) not in (list, tuple):
        raise ValueError(
            f"variables must be a list or a tuple, got {type(variables).__name__}; for a model: "
            "[v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]."
        )
    embedding_variables = []
    others = []
    for variable in variables:
        if isinstance(variable, EmbeddingVariable):
            embedding_variables.append(variable)
        else:
            others.append(variable)
    return tuple(embedding_variables), tuple(others)
