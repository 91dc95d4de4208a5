"""From the constructor's arguments to a plan, a state and the host side; and the word for arguments without effect."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from rsembed.caching import RowStore, SetAssociativeCache, num_sets_for
from rsembed.fingerprint import Fingerprint
from rsembed.kernels.contract import NO_ROW
from rsembed.tbe import records
from rsembed.tbe.arguments import (
    OptimizerArguments,
    check_arguments,
    check_module_numbers,
    states_of,
    unused_arguments,
)
from rsembed.tbe.functional import TBEState, init_state, slot_shapes
from rsembed.tbe.host_rows import Group, HostRows
from rsembed.tbe.plan import Placement, TablePasses, TablePlan, TBEPlan
from rsembed.tbe.records import CacheAlgorithm, ComputeDevice, EmbeddingLocation, EmbOptimType, SparseType, dtype_of
from rsembed.tbe.rules import make_rule
from rsembed.tbe.storage import StorageFolder

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
        if rows < 1 or dim < 1:
            raise ValueError(f"table {name!r} has {rows} rows of {dim} numbers; both must be at least 1.")
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


def _placement(location: EmbeddingLocation, *, enforce_hbm: bool) -> Placement:
    """Where a table lives. CPUs have one kind of memory, so that there only caching makes a difference."""
    if location == EmbeddingLocation.MANAGED_CACHING:
        return "device" if enforce_hbm else "cached"
    return "device" if location == EmbeddingLocation.DEVICE or default_platform() == "cpu" else "host"


def optimizer_arguments(given: SimpleNamespace) -> OptimizerArguments:
    """Those of the constructor's arguments that concern optimizers, but for the learning rate, which each table has."""
    names = {field.name for field in dataclasses.fields(OptimizerArguments)} - {"learning_rate"}
    arguments = OptimizerArguments(**{name: getattr(given, name) for name in names})
    return dataclasses.replace(arguments, optimizer_state_dtypes=dict(given.optimizer_state_dtypes or {}))


def plan_of(
    given: SimpleNamespace, features: Sequence[int], names: Sequence[str], arguments: OptimizerArguments
) -> TBEPlan:
    """The plan, with one warning for the arguments that no table's optimizer reads.

    Args:
      given: the constructor's arguments.
      features: table of every feature.
      names: of the tables.
      arguments: those of `given` that concern optimizers.

    Raises: ValueError: arguments do not go together.
    """
    check_module_numbers(given)
    optimizers = per_table(given.optimizer, len(names), "optimizer")
    rates = per_table(given.learning_rate, len(names), "learning_rate")
    dtype = dtype_of(given.weights_precision, "weights_precision").name
    unread = [set(unused_arguments(optimizer, vars(arguments))) for optimizer in optimizers]
    warn_of_no_effect(sorted(set.intersection(*unread)), f"optimizer {optimizers[0].name} does not use them")
    if len({optimizer == EmbOptimType.NONE for optimizer in optimizers}) > 1:
        raise ValueError("OptimType.NONE returns gradients instead of applying them: use it for all tables or none.")
    if len(set(optimizers)) == 1:
        # What does not go together is refused before unread arguments are left out.
        check_arguments(optimizers[0], arguments)
    if arguments.options.writeback_first_feature_only or arguments.options.precompute_writeback:
        raise NotImplementedError(
            "extra_optimizer_config: writeback_first_feature_only and precompute_writeback are not offered; "
            "use_writeback_bwd_prehook alone keeps the first gradient of each row."
        )
    tables = []
    for number, (rows, dim, location, _) in enumerate(given.embedding_specs):
        rate = rates[number]
        table = TablePlan(
            name=names[number],
            optimizer=optimizers[number],
            num_rows=rows,
            dim=dim,
            learning_rate=rate if callable(rate) else float(rate),
            dtype=dtype,
            placement=_placement(location, enforce_hbm=given.enforce_hbm),
            rounds_stochastically=given.stochastic_rounding,
        )
        tables.append(_with_rule(table, arguments))
        _check_passes(tables[-1])
    return TBEPlan.of(tables, features, given.pooling_mode.name.lower())


HYPER_PARAMETERS = ("eps", "beta1", "beta2", "weight_decay", "lower_bound")


def with_hyper_parameters(
    plan: TBEPlan, arguments: OptimizerArguments, changes: Mapping[str, float]
) -> tuple[TBEPlan, OptimizerArguments]:
    """The plan with other hyperparameters in its rules, and the arguments of the optimizers from now on.

    Raises: NotImplementedError: a name is unknown, or no table's optimizer reads it. ValueError: a value is impossible.
    """
    for name, value in changes.items():
        if name not in HYPER_PARAMETERS or not any(_reads(table, name, arguments) for table in plan.tables):
            raise NotImplementedError(
                f"setting hyper-parameter {name!r} is not supported by this module's optimizers; there are lr and, as "
                f"far as an optimizer reads them, {', '.join(HYPER_PARAMETERS)}."
            )
        change: dict[str, Any] = {name: value}
        if name == "lower_bound":
            decay = dataclasses.replace(arguments.global_weight_decay, lower_bound=value)  # type: ignore[type-var]
            change = {"global_weight_decay": decay}
        arguments = dataclasses.replace(arguments, **change)
    return dataclasses.replace(plan, tables=tuple(_with_rule(table, arguments) for table in plan.tables)), arguments


def _reads(table: TablePlan, name: str, arguments: OptimizerArguments) -> bool:
    if name == "lower_bound":
        return table.passes.global_decay is not None
    # Whatever differs from its default and is not read is reported as unused.
    return name not in unused_arguments(table.optimizer, {**vars(arguments), name: -1.0})


def _with_rule(table: TablePlan, arguments: OptimizerArguments) -> TablePlan:
    """The table with what its optimizer makes of those arguments that it reads."""
    optimizer, unread = table.optimizer, unused_arguments(table.optimizer, vars(arguments))
    read = {name: value for name, value in vars(arguments).items() if name not in unread}
    own = OptimizerArguments(**{**read, "learning_rate": table.learning_rate})
    is_ensemble = optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    is_emainplace = optimizer == EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD
    average = (own.optimizer_state_dtypes or {}).get("momentum2", SparseType.FP32)
    passes = TablePasses(
        ensemble=(own.ensemble_mode or records.EnsembleModeDefinition()) if is_ensemble else None,
        emainplace=(own.emainplace_mode or records.EmainplaceModeDefinition()) if is_emainplace else None,
        counter=own.counter_based_regularization,
        global_decay=own.global_weight_decay,
        average_dtype=dtype_of(average, "optimizer_state_dtypes").name,
        weight_decay=own.weight_decay,
        writes_first_gradient_only=optimizer == EmbOptimType.EXACT_SGD and own.options.use_writeback_bwd_prehook,
    )
    states = states_of(optimizer, own)
    return table._replace(
        rule=make_rule(optimizer, **vars(own)),
        passes=passes,
        state_names=tuple(states),
        torch_state_names=tuple(states.values()),
    )


def _check_passes(table: TablePlan) -> None:
    passes = table.passes
    if passes.emainplace is not None and table.dim % 2:
        raise ValueError(
            f"table {table.name!r}: EMAINPLACE_ROWWISE_ADAGRAD needs an even embedding_dim, got {table.dim}."
        )
    whole = [table.optimizer.name] if passes.ensemble or passes.emainplace else []
    whole += ["weight_decay_mode COUNTER"] if passes.counter else []
    if table.is_cached and whole:
        raise NotImplementedError(
            f"table {table.name!r}: {whole[0]} goes over whole tables, which a table on the host behind a cache cannot "
            "do in one step; use EmbeddingLocation.DEVICE, or enforce_hbm=True."
        )


def host_rows_of(plan: TBEPlan, given: SimpleNamespace) -> HostRows | None:
    """Caches and stores of the tables that live on the host; None when there are none."""
    if not plan.has_cache:
        return None
    storage = None if given.storage_folder is None else StorageFolder(given.storage_folder, _in_files(plan))
    memory, groups = jax.local_devices()[0].memory_stats() or {}, []
    free_bytes = memory["bytes_limit"] - memory.get("bytes_in_use", 0) if "bytes_limit" in memory else None
    for number, group in enumerate(plan.groups):
        table = plan.table_of(group)
        if not table.is_cached:
            continue
        dtype = jnp.dtype(table.dtype)
        cache_dtype = dtype if given.cache_precision is None else dtype_of(given.cache_precision, "cache_precision")
        slots = slot_shapes(table, group.num_rows)
        if table.placement == "host":
            num_sets = 1  # the least that a cache can have: rows visit for one batch
        elif given.cache_sets > 0:
            num_sets = given.cache_sets
        else:
            num_sets = num_sets_for(
                group.num_rows,
                given.cache_load_factor,
                row_bytes=table.dim * cache_dtype.itemsize + sum(s.dtype.itemsize * s.shape[1] for s in slots),
                free_bytes=free_bytes,
                reserved_bytes=int(given.cache_reserved_memory * 2**30),
            )
        algorithm = given.cache_algorithm.name.lower()
        cache = SetAssociativeCache(num_sets, algorithm=algorithm, num_ids=group.num_rows)
        shapes = [jax.ShapeDtypeStruct((group.num_rows, table.dim), dtype), *slots]
        stores = [
            RowStore.in_memory(shape.shape, shape.dtype)
            if storage is None
            else storage.store(f"group{number}_{label}", shape.shape, shape.dtype)
            for label, shape in zip(("weights", *table.state_names), shapes, strict=True)
        ]
        groups.append(Group(number, cache, tuple(stores)))
    counts_features = bool(given.record_cache_metrics and given.record_cache_metrics.record_tablewise_cache_miss)
    if storage is not None and storage.is_new:
        storage.commit(0)
    elif storage is not None and (others := [table.name for table in plan.tables if not table.is_cached]):
        warnings.warn(
            f"storage_folder keeps tables behind a cache only: tables {others} begin anew, beside others at step "
            f"{storage.step}; load their weights and states.",
            stacklevel=4,
        )
    return HostRows(plan, groups, counts_features=counts_features, storage=storage)


def _in_files(plan: TBEPlan) -> Fingerprint:
    """What the files of cached tables depend on."""
    tables = plan.layout.facts["tables"]
    for table in plan.tables:
        del tables[table.name]["placement"]
        tables[table.name]["state_dtypes"] = [slot.dtype.name for slot in slot_shapes(table)]
    return Fingerprint.of({table.name: tables[table.name] for table in plan.tables if table.is_cached})


def first_state(
    plan: TBEPlan, key: PRNGKeyArray, host_rows: HostRows | None, precision: SparseType | None, device: Any
) -> TBEState:
    """The state before any training, on `device`."""
    rows, cached = [group.num_rows for group in plan.groups], [] if host_rows is None else host_rows.groups
    for group in cached:
        rows[group.number] = group.num_places
    state = init_state(plan, key, rows)
    state = state if device is None else jax.device_put(state, device)
    if precision is not None:
        for group in cached:
            weights = state.weights[group.number].astype(dtype_of(precision, "cache_precision"))
            state = state.with_group(group.number, weights=weights)
    if host_rows is not None:
        state = state._replace(generation=jnp.asarray(host_rows.generation, jnp.uint32))
        if host_rows.storage is not None:
            step = jnp.asarray(host_rows.storage.step, jnp.int32)
            state = state._replace(step=step, passed_step=step + 0)
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


_OF_CACHES = {
    "cache_algorithm": CacheAlgorithm.LRU,
    "cache_load_factor": 0.2,
    "cache_sets": 0,
    "cache_reserved_memory": 0.0,
    "cache_precision": None,
    "enforce_hbm": False,
    "prefetch_pipeline": False,
    "multipass_prefetch_config": None,
    "gather_uvm_cache_stats": False,
    "record_cache_metrics": None,
    "storage_folder": None,
}
"""Arguments that concern caches alone, and their defaults."""


def warn_of_arguments(plan: TBEPlan, given: SimpleNamespace) -> None:
    """Warns of those of the constructor's arguments that change nothing."""
    locations = {location for _, _, location, _ in given.embedding_specs}
    if not plan.has_cache:
        unused = [name for name, default in _OF_CACHES.items() if getattr(given, name) not in (default, None)]
        why = "as no table has EmbeddingLocation.MANAGED_CACHING"
        if EmbeddingLocation.MANAGED_CACHING in locations:
            unused, why = [name for name in unused if name != "enforce_hbm"], "as enforce_hbm is set"
        warn_of_no_effect(unused, why)
    of_others = ("uvm_non_rowwise_momentum", "use_experimental_tbe", "uvm_host_mapped")
    unused = [name for name in of_others if getattr(given, name)]
    unused += ["max_gradient"] if not given.gradient_clipping and given.max_gradient != 1.0 else []
    warn_of_no_effect(unused, "here")
    platforms = {ComputeDevice.CUDA: "gpu", ComputeDevice.TPU: "tpu"}
    named = {compute_device for _, _, _, compute_device in given.embedding_specs}
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
