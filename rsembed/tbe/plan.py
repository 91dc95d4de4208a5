"""Plan of a table-batched module: which tables share an array, and which features read them."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from rsembed.bags import Bags
from rsembed.checks import check_type
from rsembed.collection.devices import Devices
from rsembed.collection.engine import Engine
from rsembed.collection.placement import make_stacks, placement_of_tables
from rsembed.collection.prepared import PreparedBatch, identity_of
from rsembed.fingerprint import ELSEWHERE, Fingerprint
from rsembed.kernels.contract import NO_ROW, Call, Combiner, IdList, Segment
from rsembed.optimizers.base import LearningRate, OptimizerSpec
from rsembed.optimizers.regularization import (
    CounterWeightDecayMode,
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
)
from rsembed.optimizers.regularized import CounterAdagrad, DecayedAdagrad
from rsembed.specs import FeatureSpec, TableSpec
from rsembed.stacking import StackingPlan, plan_stack, split_by_memory
from rsembed.tbe import arguments
from rsembed.tbe.arguments import (
    Arguments,
    BoundsCheckMode,
    CacheAlgorithm,
    EmbOptimType,
    PoolingMode,
    TableOptimizer,
)


class EmbeddingLocation(enum.IntEnum):
    """Memory that holds the rows of a table: device, host, or host with a cache on the device.

    `TableBatchedEmbeddingBags` rejects the member MTIA, because JAX has no MTIA backend.
    """

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(enum.IntEnum):
    """Kind of device that looks up rows. GPU is an alias of CUDA.

    FBGEMM's `ComputeDevice` does not have the members GPU and TPU. `TableBatchedEmbeddingBags`
    rejects the member MTIA, because JAX has no MTIA backend.
    """

    CPU = 0
    CUDA = 1
    GPU = 1
    MTIA = 2
    TPU = 3


EmbeddingSpec = tuple[int | np.integer, int | np.integer, EmbeddingLocation, ComputeDevice]
Placement = Literal["device", "cached", "host"]
AnyBatch: TypeAlias = Call | PreparedBatch
"""A checked batch: a `Call` on one device, a `PreparedBatch` on a mesh."""
Batch = TypeVar("Batch", Call, PreparedBatch, AnyBatch)
LIST = "all"
"""The only key of `PreparedBatch.lists`, because one `Bags` contains the ids of all features."""
BagSizes = tuple[tuple[int, ...], ...]
"""`sizes[f][r]` is the number of bags of feature `f` from rank `r`."""


class TablePlan(NamedTuple):
    """Plan of one logical table.

    Args:
      name: name of the table in error messages and state dicts.
      optimizer: optimizer of the table, as passed to the module.
      num_rows: number of rows.
      dim: number of columns.
      dtype: dtype of the stored rows.
      near_dtype: dtype of the rows on the device, which may differ from `dtype` if the table is
        stored on the host.
      rule: optimizer that updates looked-up rows. For OptimType.NONE, the rule is SGD, and is never
        used, because `backward` returns the gradients of the rows.
      placement: `device`, `cached` (on the host, with a cache on the device) or `host` (each batch
        copies its rows to the device and back).
      shared_by: placement on a mesh: `row`, `table`, `column` or `replicated`. Without a mesh,
        `shared_by` is `replicated`.
      rounds_stochastically: whether updated rows of a dtype other than float32 are rounded
        stochastically.
      whole_table_mode: settings of ENSEMBLE_ROWWISE_ADAGRAD or EMAINPLACE_ROWWISE_ADAGRAD, which
        may change all rows of a table before the lookup of a training step. None for all optimizers
        except ENSEMBLE_ROWWISE_ADAGRAD and EMAINPLACE_ROWWISE_ADAGRAD.
      copy_dtypes: dtype of the slow copy of the table that ENSEMBLE_ROWWISE_ADAGRAD needs. Empty
        for all optimizers except ENSEMBLE_ROWWISE_ADAGRAD. In `TBEState.slots`, the slow copy
        follows the slots of `rule`.
      torch_state_names: names of the optimizer states in torch's optimizers.
    """

    name: str
    optimizer: TableOptimizer
    num_rows: int
    dim: int
    dtype: str
    near_dtype: str
    rule: OptimizerSpec
    placement: Placement = "device"
    shared_by: str = "replicated"
    rounds_stochastically: bool = True
    whole_table_mode: EnsembleModeDefinition | EmainplaceModeDefinition | None = None
    copy_dtypes: tuple[str, ...] = ()
    torch_state_names: tuple[str, ...] = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """FBGEMM's names for the table's optimizer states."""
        return arguments.state_names(self.optimizer, self.torch_state_names)

    @property
    def is_cached(self) -> bool:
        """Whether the table is stored on the host, so that a lookup copies rows to the device."""
        return self.placement != "device"

    @property
    def global_decay(self) -> GlobalWeightDecayDefinition | None:
        """Settings of weight decay mode DECOUPLE_GLOBAL, or None in other modes.

        In mode DECOUPLE_GLOBAL, a step decays only the updated rows. A lookup multiplies a row by
        the weight decay of all steps that the row has missed since its last update.
        """
        return self.rule.global_weight_decay if isinstance(self.rule, DecayedAdagrad) else None

    @property
    def has_iter(self) -> bool:
        """Whether FBGEMM lists the number of steps, `iter`, among the table's optimizer states."""
        if isinstance(self.rule, CounterAdagrad):
            return (
                self.rule.regularization.counter_weight_decay_mode
                == CounterWeightDecayMode.ADAGRADW
            )
        return self.global_decay is not None

    def contents(self) -> dict[str, object]:
        """Metadata of the table. A state dict can be loaded only into tables with equal metadata.

        Hyperparameters are not part of the metadata, so they may differ.
        """
        optimizer = arguments.name_of(self.optimizer)
        if isinstance(self.optimizer, OptimizerSpec):
            optimizer = self.optimizer.identity
        states = list(self.state_names)
        return {"rows": self.num_rows, "dim": self.dim, "optimizer": optimizer, "states": states}

    def first_row(self) -> list[np.ndarray]:
        """Initial weights and optimizer states of one row, as arrays `[1, dim]` or `[1, 1]`."""
        shape = (1, self.dim)
        slots = self.rule.init_slots(jnp.zeros(shape, jnp.float32))
        arrays = [np.zeros(shape, jnp.dtype(self.dtype)), *map(np.asarray, slots)]
        for dtype in self.copy_dtypes:
            arrays.append(np.zeros(shape, jnp.dtype(dtype)))
        return arrays

    def spec(self) -> TableSpec:
        """The `TableSpec` of the table, for rsembed's `Engine`."""
        # Three settings are not part of the `TableSpec`: `functional.init_state` makes the initial
        # rows, a `Step` contains the PRNG key of stochastic rounding, and `engine_of` sets the
        # combiner of the features.
        return TableSpec(
            name=self.name,
            # A `TableSpec` needs at least one row, so an empty table gets a row that no id reads.
            vocabulary_size=max(self.num_rows, 1),
            embedding_dim=self.dim,
            dtype=self.dtype,
            optimizer=self.rule,
            # A table with stochastic rounding cannot be split by column, because random bits are
            # drawn for whole rows. Rows in float32 are not rounded.
            stochastic_rounding=self.rounds_stochastically and self.dtype != "float32",
        )


@dataclasses.dataclass(frozen=True)
class TBEPlan:
    """Plan of all tables and features of a module.

    A plan is hashable, so modules with equal plans share compiled programs.

    Args:
      tables: plans of the logical tables, in the order of `embedding_specs`.
      features: index of the table of every feature.
      pooling: `sum`, `mean` or `none`.
      feature_names: names of the features in error messages and prepared batches.
      devices: devices that share tables and samples.
    """

    tables: tuple[TablePlan, ...]
    features: tuple[int, ...]
    pooling: str
    feature_names: tuple[str, ...]
    devices: Devices

    def __post_init__(self) -> None:
        # JAX hashes the plan in every call, to find the compiled program. The hash is computed only
        # once, because hashing the plans of all tables is slow.
        fields = (self.tables, self.features, self.pooling, self.devices)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @functools.cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """By table name, the name of the table's group, and its first row among the group's rows.

        The tables of a group share one array. They differ only in name and number of rows. A group
        has the name of its first table, which is also the name of its stack in the engine. A group
        has fewer than 2**31 - 1 rows, so row numbers fit int32.
        """
        alike: dict[TablePlan, list[str]] = {}
        num_rows: dict[str, int] = {}
        for table in self.tables:
            kind = table._replace(name="", num_rows=0)
            alike.setdefault(kind, []).append(table.name)
            num_rows[table.name] = table.spec().vocabulary_size
        places = {}
        for names in split_by_memory(alike.values(), num_rows, NO_ROW - 1):
            first_row = 0
            for name in names:
                places[name] = names[0], first_row
                first_row += num_rows[name]
        return places

    @functools.cached_property
    def groups(self) -> dict[str, TablePlan]:
        """Groups of tables by name, each as the plan of one table with the rows of all tables."""
        groups = {}
        for table in self.tables:
            group, first_row = self.places[table.name]
            # The last table of a group has the group's last rows.
            num_rows = first_row + table.spec().vocabulary_size
            groups[group] = table._replace(name=group, num_rows=num_rows)
        return groups

    @functools.cached_property
    def readers(self) -> tuple[Segment, ...]:
        """For every feature, a `Segment` that reads the feature's table, but has no bags yet.

        For each batch, `_segments` copies the segments of `readers`, and sets `first_bag` and
        `num_bags` of the copies.
        """
        readers = []
        groups = list(self.groups)
        for number in self.features:
            table = self.tables[number]
            group, first_row = self.places[table.name]
            array = groups.index(group)
            readers.append(Segment(0, 0, 0, self.combiner, array, first_row, table.num_rows))
        return tuple(readers)

    @property
    def combiner(self) -> Combiner:
        """Name of the combiner that implements the pooling mode in the kernels.

        PoolingMode.MEAN is "mean_by_count", because FBGEMM divides the weighted sum by the number
        of ids.
        """
        if self.pooling == "mean":
            return "mean_by_count"
        return cast(Combiner, self.pooling)

    @property
    def is_shared(self) -> bool:
        """Whether the tables are on the devices of a mesh."""
        return self.devices.mesh is not None

    @property
    def has_cache(self) -> bool:
        """Whether at least one table has its rows on the host."""
        return any(table.is_cached for table in self.tables)

    @functools.cached_property
    def has_passes(self) -> bool:
        """Whether an optimizer needs a call of `functional.begin_step` before a training step."""
        for table in self.tables:
            if table.whole_table_mode is not None or isinstance(table.rule, CounterAdagrad):
                return True
        return False

    @functools.cached_property
    def row_layout(self) -> Fingerprint:
        """Fingerprint of the row numbering, which `RowGradients` must share with the module.

        The fingerprint depends on the group, the first row, the number of rows and the dim of every
        table and, on a mesh, on the placements and the number of devices.
        """
        of_tables = {}
        for table in self.tables:
            group, first_row = self.places[table.name]
            facts: dict[str, object] = {"group": group, "first_row": first_row}
            facts |= {"rows": table.num_rows, "dim": table.dim}
            if self.is_shared:
                num_devices = self.devices.num_devices
                facts |= {"shared_by": table.shared_by, "num_devices": num_devices}
            of_tables[table.name] = facts
        return Fingerprint.of({"tables": of_tables})

    @functools.cached_property
    def layout(self) -> Fingerprint:
        """Fingerprint of the plan, for the field `layout` of the module's `TBEState`.

        The fingerprint depends on the row numbers, dtypes, placements and optimizers of the tables.
        """
        facts: dict[str, object] = {
            "contents": self.contents.facts,
            "rows": self.row_layout.facts,
            "dtypes": {table.name: table.dtype for table in self.tables},
            "placements": {table.name: table.placement for table in self.tables},
        }
        names = [table.name for table in self.tables if table.is_cached]
        if names:
            facts[ELSEWHERE] = (
                f"rows of tables {names} are on the host, beside their cache; save module.state_dict()."
            )
        return Fingerprint.of(facts)

    @functools.cached_property
    def contents(self) -> Fingerprint:
        """Fingerprint of the tables, for the entry `contents` of the module's state dict.

        The fingerprint depends on the names, sizes and optimizers of the tables, but not on their
        placements and dtypes.
        """
        return Fingerprint.of({"tables": {table.name: table.contents() for table in self.tables}})

    def batch(
        self,
        ids: Integer[Array | np.ndarray, " nnz"],
        offsets: Int[Array | np.ndarray, " bags_plus_1"],
        weights: Float[Array | np.ndarray, " nnz"] | None,
        sizes: BagSizes | None = None,
    ) -> Call:
        """Converts a batch to a kernel `Call`. One `IdList` contains the ids of all features.

        Args:
          ids: ids of all features, feature after feature.
          offsets: positions in `ids`: the start of every bag, then the end of the last bag.
          weights: one weight per id. None: all weights are 1.
          sizes: number of bags of each feature from each rank, see `BagSizes`. None if all features
            have equally many bags.

        Raises: ValueError: the number of offsets is not the number of bags plus 1.
        """
        layout = "columns" if sizes is None else "blocks"
        segments = _segments(self, offsets.shape[0], sizes)
        return Call((IdList(ids, offsets, weights),), segments, layout)  # type: ignore[arg-type]

    def first_bags(self, batch: Call) -> Int[np.ndarray, " features_plus_1"]:
        """Index of the first bag of every feature in a batch, followed by the number of bags."""
        num_bags = [0] * len(self.features)
        for number, segment in enumerate(batch.segments):
            num_bags[number % len(num_bags)] += segment.num_bags
        return np.cumsum([0, *num_bags])


@functools.lru_cache(maxsize=256)
def _segments(plan: TBEPlan, num_offsets: int, sizes: BagSizes | None) -> tuple[Segment, ...]:
    """A `Segment` for the bags of each feature or, with `sizes`, of each pair of rank and feature.

    Raises: ValueError: the number of offsets is not the number of bags plus 1.
    """
    num_features = len(plan.features)
    by_rank = sizes
    if by_rank is None:
        by_rank = (((num_offsets - 1) // num_features,),) * num_features
    num_ranks = [len(of_feature) for of_feature in by_rank]
    num_bags = sum(map(sum, by_rank))
    if len(by_rank) != num_features or len(set(num_ranks)) > 1:
        raise ValueError(
            f"batch_size_per_feature_per_rank must have {num_features} rows, one per feature, of equal length; "
            f"got lengths {num_ranks}."
        )
    if num_offsets < 1 or num_bags + 1 != num_offsets:
        if sizes is not None:
            raise ValueError(
                f"batch_size_per_feature_per_rank adds up to {num_bags} bags, which needs as many offsets plus 1, but "
                f"there are {num_offsets}."
            )
        raise ValueError(
            f"offsets has {num_offsets} entries, which is not batch size * {num_features} features + 1; pass one "
            "offset per bag, feature after feature, and the end of the last bag."
        )
    segments = []
    for rank in range(num_ranks[0]):
        first_bag = 0
        for reader, of_feature in zip(plan.readers, by_rank, strict=True):
            first = first_bag + sum(of_feature[:rank])
            segments.append(reader._replace(first_bag=first, num_bags=of_feature[rank]))
            first_bag += sum(of_feature)
    return tuple(segments)


@functools.lru_cache(maxsize=64)
def engine_of(plan: TBEPlan) -> Engine:
    """Engine with the compiled programs for the tables of a plan.

    The engine has one stack for each group of the plan, with the name of the group. The stacks are
    in the order of the groups.
    """
    specs = [table.spec() for table in plan.tables]
    features: dict[str, FeatureSpec] = {}
    for name, table in zip(plan.feature_names, plan.features, strict=True):
        features[name] = FeatureSpec(name=name, table_spec=specs[table])
    readers = list(features.values())
    members: dict[str, list[str]] = {name: [] for name in plan.groups}
    for table_name, (group, _) in plan.places.items():
        members[group].append(table_name)
    stacks = []
    for group, names in members.items():
        stack = plan_stack(readers, names, stack_name=group, num_shards=1, pad=False)
        # The combiner is set in the stack and not in the `FeatureSpec`, because `FeatureSpec`
        # rejects the combiner "mean_by_count".
        pooled = []
        for feature in stack.features:
            pooled.append(dataclasses.replace(feature, combiner=plan.combiner))
        stacks.append(dataclasses.replace(stack, features=tuple(pooled)))
    made = make_stacks(
        StackingPlan(num_shards=1, stacks=tuple(stacks)),
        readers,
        {table.name: table.shared_by for table in plan.tables},
        plan.devices,
        exchange_capacity=None,
        implementation=None,
    )
    return Engine(features, made, plan.devices, side_by_side=True)


@functools.lru_cache(maxsize=64)
def identity(plan: TBEPlan, mode: BoundsCheckMode) -> str:
    """Digest of the tables, features, devices and bounds check that a batch is prepared for."""
    bounds_check = "ignore" if mode == BoundsCheckMode.NONE else "raise"
    lists = dict.fromkeys(plan.feature_names, LIST)
    return identity_of(engine_of(plan).features, lists, plan.devices, bounds_check)


def list_of(batch: AnyBatch) -> IdList | Bags:
    """The `IdList` or `Bags` of a batch that contains the ids of all features."""
    if isinstance(batch, Call):
        return batch.lists[0]
    return batch.lists[LIST]


def with_list(batch: Batch, **changes: Any) -> Batch:
    """A copy of the batch with new `ids`, `offsets` or `weights`."""
    changed: Any = dataclasses.replace(list_of(batch), **changes)
    lists: Any = {LIST: changed} if isinstance(batch, PreparedBatch) else (changed,)
    return dataclasses.replace(batch, lists=lists)


def per_table(value: Any, num_tables: int, what: str) -> list[Any]:
    """List with one value per table, from one value for all tables or a sequence of values.

    Raises: ValueError: `value` is a sequence, and its length is not `num_tables`.
    """
    values = [value] * num_tables
    if np.ndim(value):
        values = list(value)
    if len(values) != num_tables:
        raise ValueError(
            f"{what} has {len(values)} entries for {num_tables} tables; give one for all, or one each."
        )
    return values


def default_platform() -> str:
    """Platform of JAX's default device: `cpu`, `gpu` or `tpu`."""
    return jax.default_backend()


def device_of(device: jax.Device | str | int | None) -> jax.Device | None:
    """A JAX device from a device, its index, or a name such as `cpu`, `cuda:1` or `tpu`.

    Raises: ValueError: the device does not exist.
    """
    if device is None or isinstance(device, jax.Device):
        return device
    platform, _, number = str(device).partition(":")
    if isinstance(device, int):
        platform, number = default_platform(), str(device)
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as error:
        known = [f"{d.platform}:{d.id}" for d in jax.devices()]
        raise ValueError(f"there is no device {device!r}; this process has {known}.") from error


def make_plan(settings: Arguments) -> TBEPlan:
    """Makes the plan of a module from the arguments of its constructor.

    Raises:
      ValueError: the declaration of a table or feature is invalid, or arguments contradict each
        other.
      NotImplementedError: an optimizer or pooling mode does not work with the placement of a table,
        or an optimizer comes from another package, such as optax.
    """
    specs: Sequence[EmbeddingSpec] = settings.embedding_specs
    default_names = [f"table_{table}" for table in range(len(specs))]
    names = tuple(settings.table_names or default_names)
    features = tuple(range(len(names)))
    if settings.feature_table_map is not None:
        features = tuple(settings.feature_table_map)
    feature_names = tuple(settings.feature_names or _default_feature_names(names, features))
    _check_specs(specs, features, names, feature_names)
    if settings.prefetch_pipeline and settings.cache_algorithm != CacheAlgorithm.LRU:
        raise ValueError(
            "prefetch_pipeline needs cache_algorithm LRU: LFU cannot keep the rows of later batches."
        )
    optimizers, rates = _optimizers_and_rates(settings, len(names))
    devices = Devices.of(settings.mesh, settings.sharding_axis)
    if settings.mesh is not None and settings.device is not None:
        raise ValueError(
            f"device={settings.device!r} and a mesh do not go together; the tables are on the devices of the mesh."
        )
    dtype = settings.weights_precision.dtype
    near_dtype = settings.cache_precision.dtype
    # On CPUs, host memory is device memory, so a table with location MANAGED or HOST is treated
    # like a table with location DEVICE.
    elsewhere: Placement = "device" if default_platform() == "cpu" else "host"
    special: dict[EmbeddingLocation, Placement] = {
        EmbeddingLocation.DEVICE: "device",
        EmbeddingLocation.MANAGED_CACHING: "device" if settings.enforce_hbm else "cached",
    }
    tables: list[TablePlan] = []
    for number, (num_rows, dim, location, _) in enumerate(specs):
        optimizer = optimizers[number]
        placement = special.get(location, elsewhere)
        table = TablePlan(
            name=names[number],
            optimizer=optimizer,
            # NumPy integers overflow in products, and JSON has no form for them.
            num_rows=int(num_rows),
            dim=int(dim),
            dtype=dtype,
            near_dtype=dtype if placement == "device" else near_dtype,
            placement=placement,
            rounds_stochastically=settings.stochastic_rounding,
            **arguments.trained_by(optimizer, rates[number], settings),
        )
        _check_trained(table)
        tables.append(table)
    if settings.mesh is not None:
        _check_shared(tables, settings.pooling_mode)
    core_specs = {table.name: table.spec() for table in tables}
    shared_by = placement_of_tables(core_specs, devices, settings.placement)
    placed = tuple(table._replace(shared_by=shared_by[table.name]) for table in tables)
    pooling = settings.pooling_mode.name.lower()
    return TBEPlan(placed, features, pooling, feature_names, devices)


def _optimizers_and_rates(
    settings: Arguments,
    num_tables: int,
) -> tuple[list[TableOptimizer], list[LearningRate]]:
    """Optimizer and learning rate of every table.

    Warns about arguments that are set, but that no optimizer reads.

    Raises: see `make_plan`.
    """
    optimizers: list[TableOptimizer] = []
    rates: list[LearningRate] = []
    for optimizer, rate in zip(
        per_table(settings.optimizer, num_tables, "optimizer"),
        per_table(settings.learning_rate, num_tables, "learning_rate"),
        strict=True,
    ):
        if isinstance(optimizer, OptimizerSpec):
            rate = optimizer.learning_rate
        else:
            optimizer = arguments.member(EmbOptimType, optimizer, "optimizer")
        check_type(rate, float | Callable, "learning_rate")
        optimizers.append(optimizer)
        rates.append(rate if callable(rate) else float(rate))
    num_without = optimizers.count(EmbOptimType.NONE)
    if 0 < num_without < num_tables:
        raise ValueError(
            "OptimType.NONE returns gradients instead of applying them: use it for all tables or none."
        )
    settings.warn_of_no_effect(
        sorted(arguments.unread_arguments(optimizers, settings)),
        f"optimizer {arguments.name_of(optimizers[0])} does not use them",
    )
    arguments.check_arguments(optimizers, settings)
    return optimizers, rates


def _default_feature_names(names: Sequence[str], features: Sequence[int]) -> list[str]:
    """For every feature, its table's name, with an index if several features read the table."""
    readers = []
    for feature, table in enumerate(features):
        # If a feature has a table index out of range, the name is only a placeholder, because
        # `_check_specs` will reject the feature.
        readers.append(names[table] if 0 <= table < len(names) else f"feature_{feature}")
    numbered = []
    for feature, name in enumerate(readers):
        if readers.count(name) > 1:
            name = f"{name}_{readers[:feature].count(name)}"
        numbered.append(name)
    return numbered


def _check_specs(
    specs: Sequence[EmbeddingSpec],
    features: Sequence[int],
    names: Sequence[str],
    feature_names: Sequence[str],
) -> None:
    """Checks the declarations of tables and features.

    Raises: ValueError: a declaration is invalid. An error message about one table or feature
      contains the name of the table or feature.
    """
    if not specs:
        raise ValueError("embedding_specs is empty; a module needs at least one table.")
    for argument, passed, count in (
        ("table_names", names, len(specs)),
        ("feature_names", feature_names, len(features)),
    ):
        if len(passed) != count or len(set(passed)) != count:
            raise ValueError(f"{argument} must be {count} different names, got {list(passed)}.")
    for (rows, dim, location, compute_device), name in zip(specs, names, strict=True):
        if rows < 0 or dim < 1:
            raise ValueError(
                f"table {name!r} has {rows} rows of {dim} numbers; at least 0 rows of 1 number are needed."
            )
        if rows >= NO_ROW:
            raise ValueError(
                f"table {name!r} has {rows} rows, but ids are 32-bit numbers here, so that a table has {NO_ROW - 1} at "
                "most; hash the ids into fewer rows, or split the table into several by ranges of ids."
            )
        if location == EmbeddingLocation.MTIA or compute_device == ComputeDevice.MTIA:
            raise ValueError(
                f"table {name!r} is placed on MTIA, which JAX has no backend for; use DEVICE."
            )
    for feature, table in enumerate(features):
        if not 0 <= table < len(specs):
            raise ValueError(
                f"feature {feature_names[feature]!r} reads table {table}, but there are {len(specs)} tables."
            )
    unread = [name for table, name in enumerate(names) if table not in features]
    if unread:
        raise ValueError(
            f"tables {unread} have no feature; each table needs one in feature_table_map."
        )


def _check_trained(table: TablePlan) -> None:
    """Checks that the optimizer of a table supports the dim and the placement of the table.

    Raises:
      ValueError: the optimizer needs an even dim.
      NotImplementedError: the table is on the host, and the optimizer reads or writes all rows of a
        table in a step.
    """
    if isinstance(table.whole_table_mode, EmainplaceModeDefinition) and table.dim % 2:
        raise ValueError(
            f"table {table.name!r}: EMAINPLACE_ROWWISE_ADAGRAD needs an even embedding_dim, got {table.dim}."
        )
    counts = isinstance(table.rule, CounterAdagrad)
    goes_over_table = table.whole_table_mode is not None or counts or table.rule.moves_all_rows
    if table.is_cached and goes_over_table:
        what = "weight_decay_mode COUNTER" if counts else arguments.name_of(table.optimizer)
        raise NotImplementedError(
            f"table {table.name!r}: {what} goes over whole tables, which is not possible for a table on the host; "
            "use EmbeddingLocation.DEVICE, or enforce_hbm=True."
        )


def _check_shared(tables: Sequence[TablePlan], pooling: PoolingMode) -> None:
    """Checks that the devices of a mesh can share tables.

    Raises:
      ValueError: a table has no rows.
      NotImplementedError: a mesh does not support the pooling mode, or the placement or weight
        decay of a table.
    """
    if pooling == PoolingMode.NONE:
        raise NotImplementedError(
            "PoolingMode.NONE has one row per id, in the order of the ids, which a mesh does not keep; use "
            'EmbeddingCollection and combiner="none", which gives each sample its rows.'
        )
    for table in tables:
        reason = None
        if table.is_cached:
            reason = "its rows are on the host; use EmbeddingCollection and storage=rsembed.HostCached(...)"
        elif table.global_decay is not None:
            reason = "DECOUPLE_GLOBAL owes decay to rows that are only read; use DECOUPLE or L2"
        if reason is not None:
            raise NotImplementedError(
                f"table {table.name!r} cannot be shared by the devices of a mesh: {reason}."
            )
        if not table.num_rows:
            raise ValueError(
                f"table {table.name!r} has no rows, which a mesh could share; leave it out, or give it one."
            )
