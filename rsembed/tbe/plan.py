"""Plan of a table-batched module: which tables share an array, and which features read them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PyTree

from rsembed.checks import check_type
from rsembed.collection.devices import Devices
from rsembed.collection.engine import Engine
from rsembed.collection.placement import make_stacks, placement_of_tables
from rsembed.collection.prepared import PreparedBatch, identity_of
from rsembed.collection.stack import Stack
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
from rsembed.stacking import plan_stacking, split_by_memory
from rsembed.tbe import arguments as by_name
from rsembed.tbe.arguments import (
    Arguments,
    CacheAlgorithm,
    EmbOptimType,
    PoolingMode,
    TableOptimizer,
)


class EmbeddingLocation(enum.IntEnum):
    """Memory that holds the rows of a table: device, host, or host with a cache on the device.

    MTIA is a published name only. It is refused, because JAX has no such backend.
    """

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(enum.IntEnum):
    """Devices that look up rows. GPU means CUDA.

    GPU and TPU are extensions of the published names. MTIA is a published name only and is refused.
    """

    CPU = 0
    CUDA = 1
    GPU = 1
    MTIA = 2
    TPU = 3


EmbeddingSpec = tuple[int, int, EmbeddingLocation, ComputeDevice]
Placement = Literal["device", "cached", "host"]
AnyBatch: TypeAlias = Call | PreparedBatch
"""A checked batch: a `Call` on one device, a `PreparedBatch` on a mesh."""
BagSizes = tuple[tuple[int, ...], ...]
"""`sizes[f][r]` is the number of bags of feature `f` from rank `r`."""


class TablePlan(NamedTuple):
    """Plan of one logical table.

    Args:
      name: name in messages and state dicts.
      optimizer: optimizer that `rule` was made from.
      num_rows: number of rows.
      dim: number of columns.
      learning_rate: initial rate, or a callable without arguments or of the 0-based step.
      dtype: dtype of the stored rows.
      near_dtype: dtype of the rows on the device. It may differ from `dtype` for rows on the host.
      rule: rule that steps looked-up rows. None returns their gradients and steps nothing.
      placement: `device`, `cached` (on the host, with a cache on the device) or `host` (each batch
        copies its rows to the device and back).
      shared_by: placement on a mesh: `row`, `table`, `column` or `replicated`. Always `replicated`
        on one device.
      rounds_stochastically: whether stepped rows of a dtype other than float32 are rounded
        stochastically.
      whole_table_mode: pass over all rows before the lookup of a training step. None runs no pass.
      copy_dtypes: dtypes of the copies of the table that this pass keeps. They follow the slots of
        the rule.
      torch_state_names: names of the optimizer states in torch's optimizers.
    """

    name: str
    optimizer: TableOptimizer
    num_rows: int
    dim: int
    learning_rate: LearningRate
    dtype: str
    near_dtype: str
    rule: OptimizerSpec | None = None
    placement: Placement = "device"
    shared_by: str = "replicated"
    rounds_stochastically: bool = True
    whole_table_mode: EnsembleModeDefinition | EmainplaceModeDefinition | None = None
    copy_dtypes: tuple[str, ...] = ()
    torch_state_names: tuple[str, ...] = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Published names of the table's optimizer states."""
        return by_name.state_names(self.optimizer, self.torch_state_names)

    @property
    def is_cached(self) -> bool:
        """Whether the rows are on the host and are copied to the device for a lookup."""
        return self.placement != "device"

    @property
    def global_decay(self) -> GlobalWeightDecayDefinition | None:
        """Global weight decay, or None without it.

        Lookups apply it to a row for the steps that did not update the row.
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
        """Facts that must be equal when a state dict is loaded. Hyperparameters may differ."""
        states, own = list(self.state_names), self.optimizer
        optimizer = own.name if isinstance(own, EmbOptimType) else own.identity
        return {"rows": self.num_rows, "dim": self.dim, "optimizer": optimizer, "states": states}

    def first_slots(self) -> tuple[np.ndarray, ...]:
        """Initial optimizer states of one row, each `[1, dim]` or `[1, 1]`."""
        own = (
            () if self.rule is None else self.rule.init_slots(jnp.zeros((1, self.dim), jnp.float32))
        )
        return (
            *map(np.asarray, own),
            *(np.zeros((1, self.dim), jnp.dtype(dtype)) for dtype in self.copy_dtypes),
        )

    def spec(self) -> TableSpec:
        """The table as a `TableSpec` of the core."""
        # Initial values, rounding noise and combiner are not set here. They come from the state,
        # from each `Step` and from `_pooled`.
        spec = TableSpec(
            name=self.name,
            vocabulary_size=max(self.num_rows, 1),
            embedding_dim=self.dim,
            dtype=self.dtype,
            stochastic_rounding=self.rounds_stochastically
            # Stochastic rounding draws for whole rows, so it would forbid a split by column.
            and self.dtype != "float32",
        )
        return spec if self.rule is None else dataclasses.replace(spec, optimizer=self.rule)


class GroupPlan(NamedTuple):
    """Tables of equal dim, optimizer and placement, which share one array.

    Args:
      table: the first table of the group. The others differ from it only in name and size. Its name
        is the name of the group.
      tables: indices of all tables of the group.
      first_rows: first row of each table in the array.
      num_rows: rows of the array.
    """

    table: TablePlan
    tables: tuple[int, ...]
    first_rows: tuple[int, ...]
    num_rows: int


@dataclasses.dataclass(frozen=True)
class TBEPlan:
    """Plan of all tables and features of a module.

    A plan is hashable, so modules with equal plans share compiled programs.

    Args:
      tables: logical tables.
      features: index of the table of every feature.
      pooling: `sum`, `mean` or `none`.
      feature_names: names for messages.
      devices: devices that share tables and samples.
    """

    tables: tuple[TablePlan, ...]
    features: tuple[int, ...]
    pooling: str
    feature_names: tuple[str, ...]
    devices: Devices

    def __post_init__(self) -> None:
        # Every call looks up its compiled program by the plan, and hashing all tables is slow.
        object.__setattr__(
            self, "_hash", hash((self.tables, self.features, self.pooling, self.devices))
        )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @functools.cached_property
    def groups(self) -> tuple[GroupPlan, ...]:
        """Groups of tables that differ only in name and size.

        A group has less than 2**31 - 1 rows, so row numbers fit int32.
        """
        alike: dict[TablePlan, list[int]] = {}
        for number, table in enumerate(self.tables):
            alike.setdefault(table._replace(name="", num_rows=0), []).append(number)
        # A table of the core has at least one row, so an empty table gets one that nothing reads.
        num_rows = {number: max(table.num_rows, 1) for number, table in enumerate(self.tables)}
        groups = []
        for own in split_by_memory(alike.values(), num_rows, NO_ROW - 1):
            *first_rows, end = itertools.accumulate((num_rows[t] for t in own), initial=0)
            groups.append(GroupPlan(self.tables[own[0]], tuple(own), tuple(first_rows), end))
        return tuple(groups)

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For every table, the index of its group and its first row in the group's array."""
        found = {
            table: (number, first_row)
            for number, group in enumerate(self.groups)
            for table, first_row in zip(group.tables, group.first_rows, strict=True)
        }
        return tuple(found[table] for table in range(len(self.tables)))

    @property
    def combiner(self) -> Combiner:
        """Combiner of the kernels. FBGEMM's mean divides by the number of ids, weighted or not."""
        return "mean_by_count" if self.pooling == "mean" else cast(Combiner, self.pooling)

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Columns of every group's array."""
        return tuple(group.table.dim for group in self.groups)

    @property
    def is_shared(self) -> bool:
        """Whether the tables are on the devices of a mesh."""
        return self.devices.mesh is not None

    @property
    def has_cache(self) -> bool:
        """Whether the rows of some table are on the host."""
        return any(table.is_cached for table in self.tables)

    @functools.cached_property
    def has_passes(self) -> bool:
        """Whether `functional.begin_step` has work to do before a training step."""
        return any(
            t.whole_table_mode is not None or isinstance(t.rule, CounterAdagrad)
            for t in self.tables
        )

    @functools.cached_property
    def row_layout(self) -> Fingerprint:
        """Fingerprint of the row numbers: group, first row and size of every table."""
        return Fingerprint.of(
            {"tables": {table.name: self._place_facts(t) for t, table in enumerate(self.tables)}}
        )

    @functools.cached_property
    def layout(self) -> Fingerprint:
        """Fingerprint of a state: positions, dtypes, placements and optimizers of the tables."""
        stored = [
            {
                "dtype": table.dtype,
                "placement": table.placement,
                **table.contents(),
                **self._place_facts(t),
            }
            for t, table in enumerate(self.tables)
        ]
        facts: dict[str, object] = {
            "tables": dict(zip((table.name for table in self.tables), stored, strict=True))
        }
        if self.has_cache:
            names = [table.name for table in self.tables if table.is_cached]
            facts[ELSEWHERE] = (
                f"rows of tables {names} are on the host, beside their cache; save module.state_dict()."
            )
        return Fingerprint.of(facts)

    @functools.cached_property
    def contents(self) -> Fingerprint:
        """Fingerprint of a state dict. It does not depend on placements and dtypes."""
        return Fingerprint.of({"tables": {table.name: table.contents() for table in self.tables}})

    @functools.cached_property
    def list_of_feature(self) -> dict[str, str]:
        """For each feature, the name of its list of ids in a prepared batch: one list for all."""
        return dict.fromkeys(self.feature_names, "all")

    def _place_facts(self, table: int) -> dict[str, object]:
        group, first_row = self.places[table]
        rows, dim = self.tables[table].num_rows, self.tables[table].dim
        facts: dict[str, object] = {
            "group": group,
            "first_row": first_row,
            "rows": rows,
            "dim": dim,
        }
        if self.is_shared:
            facts |= {
                "shared_by": self.tables[table].shared_by,
                "num_devices": self.devices.num_devices,
            }
        return facts

    def batch(
        self,
        ids: Integer[Array | np.ndarray, " nnz"],
        offsets: Int[Array | np.ndarray, " bags_plus_1"],
        weights: Float[Array | np.ndarray, " nnz"] | None,
        sizes: BagSizes | None = None,
    ) -> Call:
        """A call with one list of ids.

        Args:
          ids: ids of all features, feature after feature.
          offsets: 0, then the end of every bag.
          weights: one per id, or None.
          sizes: number of bags by feature and rank, for variable batch sizes. None if all features
            have equally many.

        Raises: ValueError: the number of offsets does not fit.
        """
        layout = "columns" if sizes is None else "blocks"
        segments = _segments(self, offsets.shape[0], sizes)
        return Call((IdList(ids, offsets, weights),), segments, layout)  # type: ignore[arg-type]

    def bags_of(self, batch: Call) -> tuple[int, ...]:
        """Number of bags of every feature in a batch."""
        num_features = len(self.features)
        return tuple(
            sum(segment.num_bags for segment in batch.segments[f::num_features])
            for f in range(num_features)
        )


@functools.lru_cache(maxsize=256)
def _segments(plan: TBEPlan, num_offsets: int, sizes: BagSizes | None) -> tuple[Segment, ...]:
    """Segments of a batch: one per feature, or one per rank and feature with `sizes`.

    Raises: ValueError: the number of offsets does not fit.
    """
    num_features = len(plan.features)
    by_rank = [((num_offsets - 1) // num_features,)] * num_features if sizes is None else sizes
    bags = [sum(own) for own in by_rank]
    if len(by_rank) != num_features or len({len(own) for own in by_rank}) > 1:
        raise ValueError(
            f"batch_size_per_feature_per_rank must have {num_features} rows, one per feature, of equal length; "
            f"got lengths {[len(own) for own in by_rank]}."
        )
    if num_offsets < 1 or sum(bags) + 1 != num_offsets:
        if sizes is not None:
            raise ValueError(
                f"batch_size_per_feature_per_rank adds up to {sum(bags)} bags, which needs as many offsets plus 1, but "
                f"there are {num_offsets}."
            )
        raise ValueError(
            f"offsets has {num_offsets} entries, which is not batch size * {num_features} features + 1; pass one "
            "offset per bag, feature after feature, and the end of the last bag."
        )
    *first_bags, _ = itertools.accumulate(bags, initial=0)
    segments = []
    for rank in range(len(by_rank[0])):
        for table, first_bag, own in zip(plan.features, first_bags, by_rank, strict=True):
            first = first_bag + sum(own[:rank])
            group, first_row = plan.places[table]
            num_rows = plan.tables[table].num_rows
            segments.append(Segment(0, first, own[rank], plan.combiner, group, first_row, num_rows))
    return tuple(segments)


@functools.lru_cache(maxsize=64)
def engine_of(plan: TBEPlan) -> Engine:
    """The core's engine for the plan's tables.

    Each group is a stack, in the order of the groups.
    """
    specs = [table.spec() for table in plan.tables]
    readers = [
        FeatureSpec(name=name, table_spec=specs[t])
        for name, t in zip(plan.feature_names, plan.features, strict=True)
    ]
    groups = [[specs[t].name for t in group.tables] for group in plan.groups]
    stacks = make_stacks(
        plan_stacking(readers, groups=groups, pad=False),
        readers,
        {table.name: table.shared_by for table in plan.tables},
        plan.devices,
        exchange_capacity=None,
        implementation=None,
    )
    features = {feature.name: feature for feature in readers}
    pooling = {name: _pooled(stack, plan.combiner) for name, stack in stacks.items()}
    return Engine(features, pooling, plan.devices, side_by_side=True)


@functools.lru_cache(maxsize=64)
def identity(plan: TBEPlan, *, checks: bool) -> str:
    """Identity that a prepared batch must have: its tables, features, devices and id checks."""
    bounds_check = "raise" if checks else "ignore"
    return identity_of(engine_of(plan).features, plan.list_of_feature, plan.devices, bounds_check)


def _pooled(stack: Stack, combiner: Combiner) -> Stack:
    """The stack with all features pooled by `combiner`, which a `FeatureSpec` may not allow."""
    features = tuple(
        dataclasses.replace(feature, combiner=combiner) for feature in stack.layout.stack.features
    )
    plan = dataclasses.replace(stack.layout.stack, features=features)
    return Stack(dataclasses.replace(stack.layout, stack=plan), stack.rows)


def with_list(batch: Call, **changes: Any) -> Call:
    """The batch with other `ids`, `offsets` or `weights` in its only list."""
    return dataclasses.replace(batch, lists=(dataclasses.replace(batch.lists[0], **changes),))


def per_table(value: PyTree, num_tables: int, what: str) -> list[PyTree]:
    """One value per table, from a sequence or from one value for all.

    Raises: ValueError: the sequence has another length.
    """
    values = [value] * num_tables if np.ndim(value) == 0 else list(value)
    if len(values) != num_tables:
        raise ValueError(
            f"{what} has {len(values)} entries for {num_tables} tables; give one for all, or one each."
        )
    return values


def default_platform() -> str:
    """Platform of JAX's default device: `cpu`, `gpu` or `tpu`."""
    return jax.default_backend()


def device_of(device: jax.Device | str | int | None) -> jax.Device | None:
    """A JAX device from a device, its number, or a name such as `cpu`, `cuda:1` or `tpu`.

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
        raise ValueError(f"device {device!r} is not there; this process has {known}.") from error


def warn_of_no_effect(arguments: Sequence[str], reason: str) -> None:
    """Warns once that `arguments` change nothing, and says why. No warning if there are none."""
    if arguments:
        warnings.warn(f"{', '.join(arguments)}: no effect, {reason}.", stacklevel=5)


def make_plan(given: Arguments) -> TBEPlan:
    """The plan of a module with these arguments.

    Raises:
      ValueError: the declaration of a table or feature is impossible, or arguments contradict each
        other. The message names them and says why.
      NotImplementedError: an optimizer or pooling mode does not work with the placement of a table,
        or an optimizer belongs to another package.
    """
    specs: Sequence[EmbeddingSpec] = given.embedding_specs
    names = tuple(given.table_names or (f"table_{t}" for t in range(len(specs))))
    features = tuple(
        range(len(names)) if given.feature_table_map is None else given.feature_table_map
    )
    # `_check_specs` below refuses a table number out of range, so any name will do here.
    readers = [
        names[t] if 0 <= t < len(names) else f"feature_{feature}"
        for feature, t in enumerate(features)
    ]
    numbered = [f"{name}_{readers[:f].count(name)}" for f, name in enumerate(readers)]
    default = [
        name if readers.count(name) == 1 else own
        for name, own in zip(readers, numbered, strict=True)
    ]
    feature_names = tuple(given.feature_names or default)
    _check_specs(specs, features, names, feature_names)
    if given.prefetch_pipeline and given.cache_algorithm != CacheAlgorithm.LRU:
        raise ValueError(
            "prefetch_pipeline needs cache_algorithm LRU: LFU cannot keep the rows of later batches."
        )
    optimizers: list[TableOptimizer] = [
        own if isinstance(own, OptimizerSpec) else by_name.member(EmbOptimType, own, "optimizer")
        for own in per_table(given.optimizer, len(names), "optimizer")
    ]
    rates = [
        own.learning_rate if isinstance(own, OptimizerSpec) else rate
        for own, rate in zip(
            optimizers, per_table(given.learning_rate, len(names), "learning_rate"), strict=True
        )
    ]
    for rate in rates:
        check_type(rate, float | Callable, "learning_rate")
    rates = [rate if callable(rate) else float(rate) for rate in rates]
    if len({own == EmbOptimType.NONE for own in optimizers}) > 1:
        raise ValueError(
            "OptimType.NONE returns gradients instead of applying them: use it for all tables or none."
        )
    devices = Devices.of(given.mesh, given.sharding_axis)
    if given.mesh is not None and given.device is not None:
        raise ValueError(
            f"device={given.device!r} and a mesh do not go together; the tables are on the devices of the mesh."
        )
    unread = frozenset.intersection(*(by_name.unread_arguments(own, given) for own in optimizers))
    warn_of_no_effect(
        given.changed(sorted(unread)),
        f"optimizer {by_name.name_of(optimizers[0])} does not use them",
    )
    if len(set(optimizers)) == 1:
        # Checked here with all arguments: `trained_by` leaves out unread ones before its check.
        by_name.check_arguments(optimizers[0], given)
    dtype, near_dtype = (
        given.weights_precision.dtype,
        (given.cache_precision or given.weights_precision).dtype,
    )
    # On CPUs, host and device memory are the same, so only caching makes a difference.
    elsewhere: Placement = "device" if default_platform() == "cpu" else "host"
    special: dict[EmbeddingLocation, Placement] = {EmbeddingLocation.DEVICE: "device"}
    special[EmbeddingLocation.MANAGED_CACHING] = "device" if given.enforce_hbm else "cached"
    placed = [special.get(location, elsewhere) for _, _, location, _ in specs]
    tables = [
        TablePlan(
            name=name,
            optimizer=own,
            num_rows=rows,
            dim=dim,
            learning_rate=rate,
            dtype=dtype,
            near_dtype=dtype if placement == "device" else near_dtype,
            placement=placement,
            rounds_stochastically=given.stochastic_rounding,
            **by_name.trained_by(own, rate, given),
        )
        for name, own, rate, placement, (rows, dim, _, _) in zip(
            names, optimizers, rates, placed, specs, strict=True
        )
    ]
    for table in tables:
        _check_trained(table)
    if given.mesh is not None:
        _check_shared(tables, given.pooling_mode)
    core_specs = {} if given.mesh is None else {table.name: table.spec() for table in tables}
    placements = placement_of_tables(core_specs, devices, given.placement)
    shared = tuple(
        table._replace(shared_by=placements.get(table.name, "replicated")) for table in tables
    )
    pooling = given.pooling_mode.name.lower()
    return TBEPlan(shared, features, pooling, feature_names, devices)


def _check_specs(
    specs: Sequence[EmbeddingSpec],
    features: Sequence[int],
    names: Sequence[str],
    feature_names: Sequence[str],
) -> None:
    """Raises: ValueError: the declaration of a table or feature is impossible. Names it."""
    if not specs:
        raise ValueError("embedding_specs is empty; a module needs at least one table.")
    for what, given, count in (
        ("table_names", names, len(specs)),
        ("feature_names", feature_names, len(features)),
    ):
        if len(given) != count or len(set(given)) != count:
            raise ValueError(f"{what} must be {count} different names, got {list(given)}.")
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
    unread = [names[t] for t in range(len(specs)) if t not in features]
    if unread:
        raise ValueError(
            f"tables {unread} have no feature; each table needs one in feature_table_map."
        )


def _check_trained(table: TablePlan) -> None:
    """Checks that the optimizer can train a table of this dim and placement.

    Raises:
      ValueError: the optimizer needs an even dim.
      NotImplementedError: the optimizer reads or writes whole tables, and the table is on the host.
    """
    if isinstance(table.whole_table_mode, EmainplaceModeDefinition) and table.dim % 2:
        raise ValueError(
            f"table {table.name!r}: EMAINPLACE_ROWWISE_ADAGRAD needs an even embedding_dim, got {table.dim}."
        )
    counts = isinstance(table.rule, CounterAdagrad)
    moves_all_rows = table.rule is not None and table.rule.moves_all_rows
    if table.is_cached and (table.whole_table_mode is not None or counts or moves_all_rows):
        what = "weight_decay_mode COUNTER" if counts else by_name.name_of(table.optimizer)
        raise NotImplementedError(
            f"table {table.name!r}: {what} goes over whole tables, which a table on the host behind a cache cannot "
            "do in one step; use EmbeddingLocation.DEVICE, or enforce_hbm=True."
        )


def _check_shared(tables: Sequence[TablePlan], pooling: PoolingMode) -> None:
    """Checks that tables can be on a mesh.

    Raises:
      ValueError: a table has no rows.
      NotImplementedError: a mesh does not support this pooling mode, placement or weight decay.
    """
    if pooling == PoolingMode.NONE:
        raise NotImplementedError(
            "PoolingMode.NONE has one row per id, in the order of the ids, which a mesh does not keep; use "
            'EmbeddingCollection and combiner="none", which gives each sample its rows.'
        )
    for table in tables:
        reason = None
        if table.is_cached:
            reason = "rows on the host visit one device; use EmbeddingCollection and storage=rsembed.HostCached(...)"
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
