"""From the constructor's arguments to a plan, a state and the host side; and the word for arguments without effect."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from rsembed.caching import RowStore, SetAssociativeCache, num_sets_for
from rsembed.tbe.arguments import OptimizerArguments, check_arguments, check_offered
from rsembed.tbe.functional import TBEState, init_state, shape_of
from rsembed.tbe.host_rows import HostRows
from rsembed.tbe.plan import Placement, TablePasses, TablePlan, TBEPlan
from rsembed.tbe.records import (
    CacheAlgorithm,
    ComputeDevice,
    EmainplaceModeDefinition,
    EmbeddingLocation,
    EmbOptimType,
    EnsembleModeDefinition,
    SparseType,
    UserEnabledConfigDefinition,
    WeightDecayMode,
    dtype_of,
)
from rsembed.tbe.rules import make_rule, state_names, torch_state_names, unused_arguments

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


def placements(specs: Sequence[EmbeddingSpec], *, enforce_hbm: bool) -> list[Placement]:
    """Where each table lives. CPUs have one kind of memory, so that there only caching makes a difference."""
    found: list[Placement] = []
    for _, _, location, _ in specs:
        if location == EmbeddingLocation.MANAGED_CACHING:
            found.append("device" if enforce_hbm else "cached")
        elif location == EmbeddingLocation.DEVICE or default_platform() == "cpu":
            found.append("device")
        else:
            found.append("host")
    return found


def plan_of(
    specs: Sequence[EmbeddingSpec],
    features: Sequence[int],
    names: Sequence[str],
    pooling: str,
    optimizers: Sequence[EmbOptimType],
    learning_rates: Sequence[Any],
    optimizer_arguments: Mapping[str, Any],
    *,
    places: Sequence[Placement],
    weights_precision: SparseType,
    stochastic_rounding: bool,
) -> TBEPlan:
    """The plan, with one warning for the arguments that no table's optimizer reads.

    Raises: ValueError: arguments do not go together.
    """
    dtype = dtype_of(weights_precision, "weights_precision").name
    for optimizer in optimizers:
        check_offered(optimizer)
    unread = [set(unused_arguments(optimizer, optimizer_arguments)) for optimizer in optimizers]
    warn_of_no_effect(sorted(set.intersection(*unread)), f"optimizer {optimizers[0].name} does not use them")
    if len({optimizer == EmbOptimType.NONE for optimizer in optimizers}) > 1:
        raise ValueError("OptimType.NONE returns gradients instead of applying them: use it for all tables or none.")
    if len(set(optimizers)) == 1:
        # What does not go together is refused before unread arguments are left out.
        check_arguments(optimizers[0], OptimizerArguments(**optimizer_arguments))
    tables = []
    rates = [rate if callable(rate) else float(rate) for rate in learning_rates]
    for number, (rows, dim, _, _) in enumerate(specs):
        optimizer = optimizers[number]
        given = {k: v for k, v in optimizer_arguments.items() if k not in unread[number]}
        options = given.get("extra_optimizer_config") or UserEnabledConfigDefinition()
        mode = given.get("weight_decay_mode", WeightDecayMode.NONE)
        kinds = {"use_rowwise_bias_correction": optimizer == EmbOptimType.ADAM and options.use_rowwise_bias_correction}
        _check_passes(names[number], optimizer, dim, places[number], mode, given, options)
        tables.append(
            TablePlan(
                name=names[number],
                optimizer=optimizer,
                num_rows=rows,
                dim=dim,
                rule=make_rule(optimizer, **{**given, "learning_rate": rates[number]}),
                learning_rate=rates[number],
                dtype=dtype,
                placement=places[number],
                rounds_stochastically=stochastic_rounding,
                passes=_passes(optimizer, given, options),
                state_names=state_names(optimizer, mode, **kinds),
                torch_state_names=torch_state_names(optimizer, mode, **kinds),
            )
        )
    return TBEPlan.of(tables, features, pooling)


HYPER_PARAMETERS = ("eps", "beta1", "beta2", "weight_decay", "lower_bound")


def with_hyper_parameters(plan: TBEPlan, given: dict[str, Any], changes: Mapping[str, float]) -> TBEPlan:
    """The plan with other hyperparameters in its rules; `given`, the arguments of the optimizers, changes too.

    Raises: NotImplementedError: a name is unknown, or no table's optimizer reads it. ValueError: a value is impossible.
    """
    new = dict(given)
    for name, value in changes.items():
        if name not in HYPER_PARAMETERS or not any(_reads(table, name, new) for table in plan.tables):
            raise NotImplementedError(
                f"setting hyper-parameter {name!r} is not supported by this module's optimizers; there are lr and, as "
                f"far as an optimizer reads them, {', '.join(HYPER_PARAMETERS)}."
            )
        if name == "lower_bound":
            new["global_weight_decay"] = dataclasses.replace(new["global_weight_decay"], lower_bound=value)
        else:
            new[name] = value
    tables = []
    for table in plan.tables:
        own = {k: v for k, v in new.items() if k not in unused_arguments(table.optimizer, new)}
        rule = make_rule(table.optimizer, **{**own, "learning_rate": table.learning_rate})
        options = own.get("extra_optimizer_config") or UserEnabledConfigDefinition()
        tables.append(table._replace(rule=rule, passes=_passes(table.optimizer, own, options)))
    given.update(new)
    return dataclasses.replace(plan, tables=tuple(tables))


def _reads(table: TablePlan, name: str, given: Mapping[str, Any]) -> bool:
    if name == "lower_bound":
        return table.passes.global_decay is not None
    # Whatever differs from its default and is not read is reported as unused.
    return name not in unused_arguments(table.optimizer, {**given, name: -1.0})


def _passes(optimizer: EmbOptimType, given: Mapping[str, Any], options: UserEnabledConfigDefinition) -> TablePasses:
    is_ensemble = optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    is_emainplace = optimizer == EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD
    return TablePasses(
        ensemble=(given.get("ensemble_mode") or EnsembleModeDefinition()) if is_ensemble else None,
        emainplace=(given.get("emainplace_mode") or EmainplaceModeDefinition()) if is_emainplace else None,
        counter=given.get("counter_based_regularization"),
        global_decay=given.get("global_weight_decay"),
        average_dtype=dtype_of(
            (given.get("optimizer_state_dtypes") or {}).get("momentum2", SparseType.FP32), "optimizer_state_dtypes"
        ).name,
        weight_decay=given.get("weight_decay", 0.0),
        writes_first_gradient_only=optimizer == EmbOptimType.EXACT_SGD and options.use_writeback_bwd_prehook,
    )


def _check_passes(
    name: str,
    optimizer: EmbOptimType,
    dim: int,
    place: Placement,
    mode: WeightDecayMode,
    given: Mapping[str, Any],
    options: UserEnabledConfigDefinition,
) -> None:
    if options.writeback_first_feature_only or options.precompute_writeback:
        raise NotImplementedError(
            "extra_optimizer_config: writeback_first_feature_only and precompute_writeback are not offered; "
            "use_writeback_bwd_prehook alone keeps the first gradient of each row."
        )
    passes = _passes(optimizer, given, options)
    if passes.emainplace is not None and dim % 2:
        raise ValueError(f"table {name!r}: EMAINPLACE_ROWWISE_ADAGRAD needs an even embedding_dim, got {dim}.")
    whole = [optimizer.name] if passes.ensemble or passes.emainplace else []
    whole += [f"weight_decay_mode {mode.name}"] if passes.counter else []
    if place != "device" and whole:
        raise NotImplementedError(
            f"table {name!r}: {whole[0]} goes over whole tables, which a table on the host behind a cache cannot do "
            "in one step; use EmbeddingLocation.DEVICE, or enforce_hbm=True."
        )


def host_rows_of(
    plan: TBEPlan,
    *,
    algorithm: CacheAlgorithm,
    load_factor: float,
    num_sets: int,
    reserved_gib: float,
    precision: SparseType | None,
    folder: str | Path | None,
    counts_features: bool,
) -> HostRows | None:
    """Caches and stores of the tables that live on the host; None when there are none."""
    if not plan.has_cache:
        return None
    free_bytes = _free_bytes()
    caches, stores = {}, {}
    for number, group in enumerate(plan.groups):
        table = plan.table_of(group)
        if not table.is_cached:
            continue
        cache_dtype = jnp.dtype(table.dtype) if precision is None else dtype_of(precision, "cache_precision")
        slots = _slot_shapes(plan, number)
        row_bytes = table.dim * cache_dtype.itemsize + sum(s.dtype.itemsize * s.shape[1] for s in slots)
        if table.placement == "host":
            sets = 1  # the least that a cache can have: rows visit for one batch
        elif num_sets > 0:
            sets = num_sets
        else:
            reserved = int(reserved_gib * 2**30)
            sets = num_sets_for(
                group.num_rows, load_factor, row_bytes=row_bytes, free_bytes=free_bytes, reserved_bytes=reserved
            )
        caches[number] = SetAssociativeCache(sets, algorithm=algorithm.name.lower(), num_ids=group.num_rows)
        shapes = [jax.ShapeDtypeStruct((group.num_rows, table.dim), jnp.dtype(table.dtype)), *slots]
        labels = ("weights", *table.state_names)
        stores[number] = tuple(
            _store(folder, f"group{number}_{label}", shape.shape, shape.dtype)
            for label, shape in zip(labels, shapes, strict=True)
        )
    return HostRows(plan, caches, stores, counts_features=counts_features)


def _slot_shapes(plan: TBEPlan, number: int) -> list[jax.ShapeDtypeStruct]:
    table, num_rows = plan.table_of(plan.groups[number]), plan.groups[number].num_rows
    return [] if table.rule is None else list(jax.eval_shape(table.rule.init_slots, shape_of(table, num_rows)))


def _store(folder: str | Path | None, label: str, shape: tuple[int, ...], dtype: Any) -> RowStore:
    if folder is None:
        return RowStore.in_memory(shape, dtype)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return RowStore.in_file(Path(folder) / f"{label}.bin", shape, dtype)


def _free_bytes() -> int | None:
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in statistics:
        return None
    return int(statistics["bytes_limit"] - statistics.get("bytes_in_use", 0))


def first_state(
    plan: TBEPlan, key: PRNGKeyArray, host_rows: HostRows | None, precision: SparseType | None, device: Any
) -> TBEState:
    """The state before any training, on `device`."""
    rows = [group.num_rows for group in plan.groups]
    for group in host_rows.groups if host_rows is not None else ():
        rows[group.number] = group.num_places
    state = init_state(plan, key, rows)
    state = state if device is None else jax.device_put(state, device)
    if precision is None or host_rows is None:
        return state
    dtype, weights = dtype_of(precision, "cache_precision"), list(state.weights)
    for group in host_rows.groups:
        weights[group.number] = weights[group.number].astype(dtype)
    return state._replace(weights=tuple(weights))


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


def warn_of_arguments(
    plan: TBEPlan, specs: Sequence[EmbeddingSpec], of_caches: Mapping[str, bool], of_others: Mapping[str, bool]
) -> None:
    """Warns of given arguments (those whose value is True) that change nothing."""
    has_caching = any(location == EmbeddingLocation.MANAGED_CACHING for _, _, location, _ in specs)
    if not plan.has_cache:
        given = [name for name, is_given in of_caches.items() if is_given]
        if has_caching:
            given = [name for name in given if name != "enforce_hbm"]
        why = "as enforce_hbm is set" if has_caching else "as no table has EmbeddingLocation.MANAGED_CACHING"
        warn_of_no_effect(given, why)
    warn_of_no_effect([name for name, is_given in of_others.items() if is_given], "here")
    platforms = {ComputeDevice.CUDA: "gpu", ComputeDevice.TPU: "tpu"}
    named = {compute_device for _, _, _, compute_device in specs}
    elsewhere = sorted({c.name for c in named if platforms.get(c, default_platform()) != default_platform()})
    reason = f"as this process computes on {default_platform()}"
    warn_of_no_effect([f"ComputeDevice.{name}" for name in elsewhere], reason)


def default_feature_names(features: Sequence[int], names: Sequence[str]) -> list[str]:
    """Table names; those of tables with several features are numbered."""
    seen: dict[int, int] = {}
    found: list[str] = []
    for t in features:
        seen[t] = seen.get(t, -1) + 1
        name = names[t] if 0 <= t < len(names) else f"feature_{len(found)}"  # an error that check_specs explains
        found.append(f"{name}_{seen[t]}" if features.count(t) > 1 else name)
    return found
