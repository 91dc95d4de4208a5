"""From the constructor's arguments to a plan, a state and the host side; and the word for arguments without effect."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from rsembed.caching import NUM_WAYS, BackingStore, NearRows, SetAssociativeCache, num_sets_for
from rsembed.checks import check_type
from rsembed.collection.devices import Devices
from rsembed.collection.placement import placement_of_tables
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers import CounterAdagradOptimizerSpec, OptimizerSpec
from rsembed.tbe import records
from rsembed.tbe.arguments import CacheArguments, OptimizerArguments, check_arguments, states_of, unused_arguments
from rsembed.tbe.functional import TBEState, init_state
from rsembed.tbe.host_rows import HostRows
from rsembed.tbe.meshes import Sharing, spec_of
from rsembed.tbe.plan import GroupPlan, Placement, TablePlan, TBEPlan
from rsembed.tbe.records import ComputeDevice, EmbeddingLocation, EmbOptimType, SparseType, dtype_of
from rsembed.tbe.rules import make_rule

EmbeddingSpec = tuple[int, int, EmbeddingLocation, ComputeDevice]


def default_platform() -> str:
    """`cpu`, `gpu` or `tpu`: where arrays go by default."""
    return jax.default_backend()


def per_table(value: Any, num_tables: int, what: str) -> list[Any]:
    """One value per table, from one for all or a sequence. Raises: ValueError: another number of values."""
    if not isinstance(value, (list, tuple)):
        return [value] * num_tables
    if len(value) != num_tables:
        raise ValueError(f"{what} has {len(value)} entries for {num_tables} tables; give one for all, or one each.")
    return list(value)


def check_specs(
    specs: Sequence[EmbeddingSpec], features: Sequence[int], names: Sequence[str], feature_names: Sequence[str]
) -> None:
    """Raises: ValueError: a table or feature cannot be what it is declared as; says which and why."""
    if not specs:
        raise ValueError("embedding_specs is empty; a module needs at least one table.")
    for what, given, count in (("table_names", names, len(specs)), ("feature_names", feature_names, len(features))):
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
            raise ValueError(f"table {name!r} is placed on MTIA, which JAX has no backend for; use DEVICE.")
    for feature, table in enumerate(features):
        if not 0 <= table < len(specs):
            raise ValueError(
                f"feature {feature_names[feature]!r} reads table {table}, but there are {len(specs)} tables."
            )
    unread = [names[t] for t in range(len(specs)) if t not in features]
    if unread:
        raise ValueError(f"tables {unread} have no feature; each table needs one in feature_table_map.")


def tables_of(
    specs: Sequence[EmbeddingSpec],
    names: Sequence[str],
    *,
    optimizer: records.TableOptimizer | Sequence[records.TableOptimizer],
    learning_rate: Any,
    weights_precision: SparseType,
    enforce_hbm: bool,
    stochastic_rounding: bool,
) -> list[TablePlan]:
    """The tables of the constructor's arguments of these names, without rules."""
    optimizers = per_table(optimizer, len(names), "optimizer")
    rates = [
        own.learning_rate if isinstance(own, OptimizerSpec) else rate
        for own, rate in zip(optimizers, per_table(learning_rate, len(names), "learning_rate"), strict=True)
    ]
    for rate in rates:
        check_type(rate, float | Callable, "learning_rate")
    if len({own == EmbOptimType.NONE for own in optimizers}) > 1:
        raise ValueError("OptimType.NONE returns gradients instead of applying them: use it for all tables or none.")
    return [
        TablePlan(
            name=name,
            optimizer=own,
            num_rows=rows,
            dim=dim,
            learning_rate=rate if callable(rate) else float(rate),
            dtype=dtype_of(weights_precision, "weights_precision").name,
            placement=_placement(location, enforce_hbm=enforce_hbm),
            rounds_stochastically=stochastic_rounding,
        )
        for name, own, rate, (rows, dim, location, _) in zip(names, optimizers, rates, specs, strict=True)
    ]


def _placement(location: EmbeddingLocation, *, enforce_hbm: bool) -> Placement:
    """Where a table lives. CPUs have one kind of memory, so that there only caching makes a difference."""
    if location == EmbeddingLocation.MANAGED_CACHING:
        return "device" if enforce_hbm else "cached"
    return "device" if location == EmbeddingLocation.DEVICE or default_platform() == "cpu" else "host"


def with_rules(tables: Sequence[TablePlan], arguments: OptimizerArguments) -> tuple[TablePlan, ...]:
    """The tables with what their optimizers make of those arguments that they read.

    Raises: ValueError: arguments do not go together.
    """
    optimizers = {table.optimizer for table in tables}
    unread = [set(unused_arguments(table.optimizer, vars(arguments))) for table in tables]
    warn_of_no_effect(
        sorted(set.intersection(*unread)), f"optimizer {records.name_of(tables[0].optimizer)} does not use them"
    )
    if len(optimizers) == 1:
        # What does not go together is refused before unread arguments are left out.
        check_arguments(tables[0].optimizer, arguments)
    options = arguments.extra_optimizer_config
    if options.writeback_first_feature_only or options.precompute_writeback:
        raise NotImplementedError(
            "extra_optimizer_config: writeback_first_feature_only and precompute_writeback are not offered; "
            "use_writeback_bwd_prehook alone keeps the first gradient of each row."
        )
    return tuple(_with_rule(table, arguments) for table in tables)


def split_of(feature_names: tuple[str, ...], mesh: Any, axis: Any, device: Any) -> Sharing | None:
    """How a mesh shares the tables; None without one. Raises: ValueError: an axis is unknown, or a device is given."""
    devices = Devices.of(mesh, axis)
    if mesh is not None and device is not None:
        raise ValueError(f"device={device!r} and a mesh do not go together; the tables are on the devices of the mesh.")
    return None if mesh is None else Sharing(devices, feature_names)


def shared_tables(
    tables: tuple[TablePlan, ...], split: Sharing | None, placement: Any, pooling: records.PoolingMode
) -> tuple[TablePlan, ...]:
    """The tables as the devices of a mesh share them.

    Raises: ValueError: a placement is unknown, or a table has no rows. NotImplementedError: tables need what one device
      alone can do.
    """
    if split is None:
        placement_of_tables({}, Devices(), placement)
        return tables
    if pooling == records.PoolingMode.NONE:
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
        elif table.keeps_first_gradients:
            reason = "the write-back hook keeps the first gradient of a batch that nobody sees whole; leave it out"
        if reason is not None:
            raise NotImplementedError(f"table {table.name!r} cannot be shared by the devices of a mesh: {reason}.")
        if not table.num_rows:
            raise ValueError(
                f"table {table.name!r} has no rows, which a mesh could share; leave it out, or give it one."
            )
    specs = {table.name: spec_of(table) for table in tables}
    placements = placement_of_tables(specs, split.devices, placement)
    return tuple(table._replace(shared_by=placements[table.name]) for table in tables)


HYPER_PARAMETERS = ("eps", "beta1", "beta2", "weight_decay", "lower_bound")


def with_hyper_parameters(
    plan: TBEPlan, arguments: OptimizerArguments, changes: Mapping[str, float]
) -> tuple[TBEPlan, OptimizerArguments]:
    """The plan with other hyperparameters in its rules, and the arguments of the optimizers from now on.

    Raises: NotImplementedError: a name is unknown. ValueError: a value is impossible.
    """
    if unknown := sorted(set(changes) - set(HYPER_PARAMETERS)):
        raise NotImplementedError(
            f"setting hyper-parameter {unknown[0]!r} is not supported; there are lr, {', '.join(HYPER_PARAMETERS)}."
        )
    is_read = {name: any(_reads(table, name, arguments) for table in plan.tables) for name in changes}
    warn_of_no_effect([name for name in changes if not is_read[name]], "no table's optimizer uses them")
    for name, value in changes.items():
        if not is_read[name]:
            continue
        change: dict[str, Any] = {name: value}
        if name == "lower_bound":
            decay = dataclasses.replace(arguments.global_weight_decay, lower_bound=value)  # type: ignore[type-var]
            change = {"global_weight_decay": decay}
        arguments = dataclasses.replace(arguments, **change)
    return dataclasses.replace(plan, tables=tuple(_with_rule(table, arguments) for table in plan.tables)), arguments


def _reads(table: TablePlan, name: str, arguments: OptimizerArguments) -> bool:
    if name == "lower_bound":
        return table.global_decay is not None
    # Whatever differs from its default and is not read is reported as unused.
    return name not in unused_arguments(table.optimizer, {**vars(arguments), name: -1.0})


def _with_rule(table: TablePlan, arguments: OptimizerArguments) -> TablePlan:
    optimizer, unread = table.optimizer, unused_arguments(table.optimizer, vars(arguments))
    read = {name: value for name, value in vars(arguments).items() if name not in unread}
    own = OptimizerArguments(**{**read, "learning_rate": table.learning_rate})
    states, options = states_of(optimizer, own), own.extra_optimizer_config
    copies: tuple[str, ...] = ()
    mode: records.EnsembleModeDefinition | records.EmainplaceModeDefinition | None = None
    if optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD:
        mode = own.ensemble_mode or records.EnsembleModeDefinition()
        copy = (own.optimizer_state_dtypes or {}).get("momentum2", SparseType.FP32)
        copies = (dtype_of(copy, "optimizer_state_dtypes").name,)
    elif optimizer == EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD:
        mode = own.emainplace_mode or records.EmainplaceModeDefinition()
    table = table._replace(
        rule=make_rule(optimizer, **vars(own)),
        whole_table_mode=mode,
        copy_dtypes=copies,
        keeps_first_gradients=optimizer == EmbOptimType.EXACT_SGD and options.use_writeback_bwd_prehook,
        state_names=tuple(states),
        torch_state_names=tuple(states.values()),
    )
    if isinstance(mode, records.EmainplaceModeDefinition) and table.dim % 2:
        raise ValueError(
            f"table {table.name!r}: EMAINPLACE_ROWWISE_ADAGRAD needs an even embedding_dim, got {table.dim}."
        )
    counts = isinstance(table.rule, CounterAdagradOptimizerSpec)
    moves_all_rows = table.rule is not None and table.rule.moves_all_rows
    if table.is_cached and (mode is not None or counts or moves_all_rows):
        what = "weight_decay_mode COUNTER" if counts else records.name_of(optimizer)
        raise NotImplementedError(
            f"table {table.name!r}: {what} goes over whole tables, which a table on the host behind a cache cannot "
            "do in one step; use EmbeddingLocation.DEVICE, or enforce_hbm=True."
        )
    return table


def host_rows_of(plan: TBEPlan, caching: CacheArguments) -> HostRows | None:
    """Caches and stores of the tables that live on the host; None when there are none."""
    if not plan.has_cache:
        return None
    cached = [(number, group) for number, group in enumerate(plan.groups) if group.table.is_cached]
    caches = _caches_of([group for _, group in cached], caching)
    groups = [
        NearRows(number, cache, _backing_of(group, caching.dtype_of(group.table)))
        for (number, group), cache in zip(cached, caches, strict=True)
    ]
    return HostRows(plan, groups, counts_features=caching.record_cache_metrics.record_tablewise_cache_miss)


def _memory_of_device() -> dict[str, int] | None:
    """What the device says about its memory, if it does."""
    memory = jax.local_devices()[0].memory_stats() or {}
    return memory if "bytes_limit" in memory else None


def _caches_of(groups: Sequence[GroupPlan], caching: CacheArguments) -> list[SetAssociativeCache]:
    """Caches of the groups, which share the memory that is free where the device tells how much there is.

    Each has one set, and of what it asks for beyond that the share for which there is room.

    Raises: ValueError: there is no room for a set of each.
    """
    row_bytes = [
        group.table.dim * caching.dtype_of(group.table).itemsize
        + sum(slot.nbytes for slot in group.table.first_slots())
        for group in groups
    ]
    sets = [_wanted_sets(group, caching, own) for group, own in zip(groups, row_bytes, strict=True)]
    memory = _memory_of_device()
    if memory is not None and not caching.cache_sets:
        free, reserved = memory["bytes_limit"] - memory.get("bytes_in_use", 0), caching.cache_reserved_memory * 2**30
        num_sets_for(1, 1.0, row_bytes=sum(row_bytes), free_bytes=free, reserved_bytes=int(reserved))
        least = NUM_WAYS * sum(row_bytes)
        wanted = NUM_WAYS * sum(n * own for n, own in zip(sets, row_bytes, strict=True))
        share = min(1.0, (free - reserved - least) / max(1, wanted - least))
        sets = [1 + int((n - 1) * share) for n in sets]
    algorithm = caching.cache_algorithm.name.lower()
    return [
        SetAssociativeCache(num_sets, algorithm=algorithm, num_ids=group.num_rows)
        for num_sets, group in zip(sets, groups, strict=True)
    ]


def _wanted_sets(group: GroupPlan, caching: CacheArguments, row_bytes: int) -> int:
    if group.table.placement == "host":
        return 1  # the least that a cache can have: rows visit for one batch
    return caching.cache_sets or num_sets_for(group.num_rows, caching.cache_load_factor, row_bytes=row_bytes)


def _backing_of(group: GroupPlan, near: Any) -> BackingStore:
    table = group.table
    first = [np.zeros((1, table.dim), jnp.dtype(table.dtype)), *table.first_slots()]
    shapes = [(group.num_rows, *row.shape[1:]) for row in first]
    # Zeros take memory when they are first written.
    zeros = (np.zeros(shape, row.dtype) for shape, row in zip(shapes, first, strict=True))
    arrays = [np.full_like(own, row) if row.any() else own for own, row in zip(zeros, first, strict=True)]
    return BackingStore(arrays, near_dtype=None if near in (jnp.float32, jnp.dtype(table.dtype)) else near)


def first_state(
    plan: TBEPlan, key: PRNGKeyArray, host_rows: HostRows | None, caching: CacheArguments, device: Any
) -> TBEState:
    """The state before any training, on `device`."""
    rows, cached = [group.num_rows for group in plan.groups], [] if host_rows is None else host_rows.groups
    for group in cached:
        rows[group.number] = group.num_places
    state = init_state(plan, key, rows)
    state = state if device is None else jax.device_put(state, device)
    for group in cached:
        dtype = caching.dtype_of(plan.groups[group.number].table)
        state = state.with_group(group.number, weights=state.weights[group.number].astype(dtype))
    if host_rows is not None:
        state = state._replace(generation=jnp.asarray(host_rows.generation.number, jnp.uint32))
    return state


def device_of(device: Any) -> jax.Device | None:
    """A JAX device from one, its number, or a name such as `cpu`, `cuda:1` or `tpu`.

    Raises: ValueError: there is no such device.
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
    """One warning that names the arguments that change nothing, and why."""
    if arguments:
        warnings.warn(f"{', '.join(arguments)}: no effect, {reason}.", stacklevel=4)


def warn_of_arguments(plan: TBEPlan, caching: CacheArguments, given: Mapping[str, Any]) -> None:
    """Warns of those of the constructor's arguments that change nothing."""
    specs = given["embedding_specs"]
    if not plan.has_cache:
        unused, why = caching.changed(), "as no table has EmbeddingLocation.MANAGED_CACHING"
        if EmbeddingLocation.MANAGED_CACHING in {location for _, _, location, _ in specs}:
            unused, why = [name for name in unused if name != "enforce_hbm"], "as enforce_hbm is set"
        warn_of_no_effect(unused, why)
    elif caching.cache_reserved_memory and caching.cache_sets:
        warn_of_no_effect(["cache_reserved_memory"], "as cache_sets says how large caches are")
    elif caching.cache_reserved_memory and _memory_of_device() is None:
        warn_of_no_effect(["cache_reserved_memory"], "as this device does not tell how much memory it has")
    of_others = ("uvm_non_rowwise_momentum", "use_experimental_tbe", "uvm_host_mapped")
    unused = [name for name in of_others if given[name]]
    unused += ["max_gradient"] if not given["gradient_clipping"] and given["max_gradient"] != 1.0 else []
    warn_of_no_effect(unused, "here")
    platforms = {ComputeDevice.CUDA: "gpu", ComputeDevice.TPU: "tpu"}
    named = {compute_device for _, _, _, compute_device in specs}
    elsewhere = sorted({c.name for c in named if platforms.get(c, default_platform()) != default_platform()})
    reason = f"as this process computes on {default_platform()}"
    warn_of_no_effect([f"ComputeDevice.{name}" for name in elsewhere], reason)


def default_feature_names(features: Sequence[int], names: Sequence[str]) -> list[str]:
    """Table names; those of tables with several features are numbered."""
    found = []
    for feature, t in enumerate(features):
        name = names[t] if 0 <= t < len(names) else f"feature_{feature}"  # an error that check_specs explains
        found.append(f"{name}_{features[:feature].count(t)}" if features.count(t) > 1 else name)
    return found
