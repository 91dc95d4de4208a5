"""Layout of placed specs: shards, stacks and sizes, read from specs that a stacking function has placed.

`D` devices with `C` cores each make `S = D * C` shards. Row `id` of a table lies in shard `(id + rotation) % S`; device
`k` holds shards `k * C` to `k * C + C - 1` of every stack, one after the other.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union

import jax
import numpy as np
from jaxtyping import Array, PyTree

from rsembed.checks import PositiveInt, check_type
from rsembed.collection.dense_rows import RowLayout
from rsembed.specs import FeatureIdTransformation, FeatureSpec, StackedTableSpec, TableSpec, features_of, tables_of
from rsembed.stacking import SUBLANES, FeaturePlacement, StackPlan, TablePlacement, place_of, plan_stack, round_up

T = TypeVar("T")
# A tree: `Nested[FeatureSpec]` is a FeatureSpec, or (lists or dicts of) lists or dicts of them.
Nested = Union[T, Sequence[Any], Mapping[Any, Any]]  # noqa: UP007  (X | Y cannot be subscripted)

ArrayLike = jax.Array | np.ndarray
Scalar = ArrayLike | float
"""A number, traced or not, such as a step."""
MAX_MINIBATCHES = 64
MAX_SAMPLES_PER_DEVICE = 2**26 - 1
CORES_VARIABLE = "RSEMBED_CORES_PER_DEVICE"
EMULATED_CORES = 4
"""Cores that a device without SparseCores is laid out with, as a TPU v5p, unless `CORES_VARIABLE` is set."""

NUM_SC_PER_DEVICE_MAP = {"TPU v5": 4, "TPU v5p": 4, "TPU v6 lite": 2, "TPU v6e": 2, "TPU7x": 2}
"""SparseCores of a device, by its kind."""


def num_sparsecores_per_device(device: jax.Device | None = None) -> int:
    """Number of SparseCores of a device: 4 on TPU v5p, 2 on v6e and TPU7x; elsewhere, the emulated number.

    CPUs and GPUs are laid out as a TPU v5p, with 4 cores, or with as many as the environment variable
    `RSEMBED_CORES_PER_DEVICE` says. Activations and updates do not depend on it; limits and statistics do.

    Args:
      device: None means the first device.

    Raises: ValueError: a TPU of unknown kind, or the variable holds no number of cores.
    """
    device = jax.devices()[0] if device is None else device
    if device.platform == "tpu":
        if device.device_kind not in NUM_SC_PER_DEVICE_MAP:
            raise ValueError(
                f"{device.device_kind!r} is not known to have SparseCores (known: {', '.join(NUM_SC_PER_DEVICE_MAP)}); "
                "pass num_sc_per_device to lay tables out as if it had."
            )
        return NUM_SC_PER_DEVICE_MAP[device.device_kind]
    chosen = os.environ.get(CORES_VARIABLE) or str(EMULATED_CORES)
    if not chosen.isdecimal() or int(chosen) < 1:
        raise ValueError(f"{CORES_VARIABLE} must be a number of cores from 1 on, such as 4, got {chosen!r}.")
    return int(chosen)


def resolve_cores(num_sc_per_device: int | None, global_device_count: int) -> int:
    """Cores per device: `num_sc_per_device`, checked, or the default of this machine."""
    check_type(global_device_count, PositiveInt, "global_device_count")
    check_type(num_sc_per_device, PositiveInt | None, "num_sc_per_device")
    return num_sparsecores_per_device() if num_sc_per_device is None else num_sc_per_device


ShardingStrategy = enum.Enum("ShardingStrategy", "MOD")
"""Rules that assign rows to shards."""


def sharding_strategy_to_enum(sharding_strategy: str) -> ShardingStrategy:
    """The strategy of that name, in any case. Raises: ValueError: the name is unknown."""
    if not isinstance(sharding_strategy, str) or sharding_strategy.upper() != "MOD":
        raise ValueError(f"unknown sharding strategy {sharding_strategy!r}; the only one is 'MOD'.")
    return ShardingStrategy.MOD


_PLACE_ANEW = (
    "A stack serves just the features that it was placed with, all of them, unchanged and not copied. For other batch "
    "sizes or more features, make new TableSpecs and FeatureSpecs of all and place them by the same calls: variables "
    "go with both."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """A stack on some devices: tables in the order of rows, and their features in the order of samples.

    Where nothing but rows matters there are no features, and all shards count as those of one device.
    """

    spec: StackedTableSpec
    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...] = ()
    num_devices: int = 1

    @property
    def name(self) -> str:
        """The stack's name."""
        return self.spec.stack_name

    @property
    def num_shards(self) -> int:
        """Number of shards over all devices."""
        return self.spec.num_shards

    @property
    def num_cores(self) -> int:
        """Number of cores, and so of shards, of a device."""
        return self.num_shards // self.num_devices

    @property
    def rows_per_shard(self) -> int:
        """Number of rows of the physical table in one shard."""
        return self.spec.stack_vocab_size // self.num_shards

    @property
    def samples_per_core(self) -> int:
        """Number of samples of all features together that one core handles."""
        return self.spec.total_sample_count // self.num_shards

    @property
    def declared_ids(self) -> int | None:
        """Number of ids in a device's part of the batch, if every feature declares its ids per sample; else None."""
        shapes = [feature.input_shape for feature in self.features]
        if any(shape is None or None in shape for shape in shapes):
            return None
        return sum(math.prod(shape) for shape in shapes if shape is not None) // self.num_devices

    @property
    def plan(self) -> StackPlan:
        """The stack's placement, as the core plans it."""
        return StackPlan(
            spec=self.spec,
            dtype=self.tables[0].dtype,
            tables=tuple(TablePlacement.of(table, table.setting_in_stack) for table in self.tables),
            features=tuple(FeaturePlacement.of(feature, feature.id_transformation) for feature in self.features),
        )

    @functools.cached_property
    def row_layout(self) -> RowLayout:
        """The core's layout of the stack's rows."""
        return RowLayout.as_planned(self.plan, self.num_cores)

    def check_features(self) -> None:
        """Raises: ValueError: the features lie elsewhere than they were placed, or cannot be cut into equal parts."""
        end = 0
        for feature in self.features:
            feature.check_pooled_as_table()
            samples, found = feature.num_samples or 0, feature.id_transformation
            table = place_of(feature.table_spec.setting_in_stack, self.num_shards)
            place = FeatureIdTransformation(end, table.first, table.rotation)
            if found != place:
                raise ValueError(
                    f"feature {feature.name!r} does not lie where stack {self.name!r} has room for it: it has {found}, "
                    f"but {place} comes next. {_PLACE_ANEW}"
                )
            if not samples or samples % self.num_shards:
                raise ValueError(
                    f"feature {feature.name!r}: its global batch of {samples} samples cannot be cut into "
                    f"{self.num_shards} equal parts ({self.num_devices} devices x {self.num_cores} cores); use a "
                    f"multiple of {self.num_shards}, or lay tables out with a smaller num_sc_per_device."
                )
            end += samples
        if end != self.spec.total_sample_count:
            raise ValueError(
                f"stack {self.name!r} was placed for {self.spec.total_sample_count} samples, but features "
                f"{[feature.name for feature in self.features]} have {end}. {_PLACE_ANEW}"
            )

    def checked_activations(self, activations: Array) -> Array:
        """One device's stacked activations or gradients, unchanged. Raises: ValueError: they have another shape."""
        shape = (self.samples_per_core * self.num_cores, self.spec.stack_embedding_dim)
        if activations.shape != shape:
            raise ValueError(
                f"stack {self.name!r}: activations (or their gradients) have shape {activations.shape}, expected "
                f"{shape} on each of {self.num_devices} devices."
            )
        return activations

    def buffer_size_per_device(self, enable_minibatching: bool = False) -> int:
        """Size of a device's input buffer, in entries: room for every minibatch, unless a smaller size is suggested.

        Raises: ValueError: the suggested size is more than the limits could ever fill.
        """
        max_ids = self.spec.max_ids_per_partition
        largest = coo_buffer_size(max_ids, self.num_devices, self.num_cores, enable_minibatching)
        suggested = self.spec.suggested_coo_buffer_size_per_device
        if suggested is None:
            return largest
        size = round_up(suggested, SUBLANES * self.num_cores)
        if size > largest and len(self.tables) > 1:
            return largest  # the sizes of several tables were added, their limits were not
        if size > largest:
            raise ValueError(
                f"stack {self.name!r}: suggested_coo_buffer_size_per_device={suggested} (rounded to {size}) is above "
                f"{largest}, the most that max_ids_per_partition={max_ids} can fill with "
                f"{self.num_devices} devices and {self.num_cores} cores each; lower it, or leave it None."
            )
        return size


def compute_row_pointers_size_per_device(
    *, global_device_count: int, num_sc_per_device: int | None = None, enable_minibatching: bool = False
) -> int:
    """Number of a device's row pointers for one stack: at least 8 per core, or per core and minibatch."""
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    return max(global_device_count * num_cores, SUBLANES) * num_cores * (MAX_MINIBATCHES if enable_minibatching else 1)


def compute_theoretical_max_coo_buffer_size(
    max_ids_per_partition: int,
    global_device_count: int,
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
) -> int:
    """Entries that a device's buffer must hold if every partition (of every minibatch) reaches its limit."""
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    return coo_buffer_size(max_ids_per_partition, global_device_count, num_cores, enable_minibatching)


def coo_buffer_size(max_ids: int, num_devices: int, num_cores: int, enable_minibatching: bool) -> int:
    """As `compute_theoretical_max_coo_buffer_size`, without checks: each batch calls it for every stack."""
    num_partitions = num_cores * num_devices * num_cores * (MAX_MINIBATCHES if enable_minibatching else 1)
    return round_up(max_ids, SUBLANES) * num_partitions


def cores_of(tables: Sequence[TableSpec], num_devices: int, num_sc_per_device: int | None) -> int:
    """Cores per device that tables were placed for, compared with `num_sc_per_device` unless that is None.

    Raises: ValueError: a table has no place yet, or one for another number of shards.
    """
    check_type(num_devices, PositiveInt, "global_device_count")
    if num_sc_per_device is None and placed_stack(tables[0]).num_shards:
        num_sc_per_device = max(1, placed_stack(tables[0]).num_shards // max(1, num_devices))
    cores = resolve_cores(num_sc_per_device, num_devices)
    for table in tables:
        placed = placed_stack(table).num_shards
        if placed not in (0, num_devices * cores):
            raise ValueError(
                f"table {table.name!r} was laid out for another number of shards: {placed}, not {num_devices * cores} "
                "(devices times cores). Use the global_device_count and num_sc_per_device that it was placed with "
                "(None takes the latter from the specs), or place new specs."
            )
    return cores


def stack_layouts(
    feature_specs: Nested[FeatureSpec], *, num_devices: int, num_cores: int | None
) -> dict[str, StackLayout]:
    """Checked stacks of `feature_specs` by name, in leaf order; num_cores=None takes the placed number.

    Raises:
      ValueError: a table was not placed yet, or for another number of shards; features are not those it was placed for,
        or cannot be cut into equal parts.
    """
    num_shards = num_devices * cores_of(list(tables_of(feature_specs).values()), num_devices, num_cores)
    layouts = stacks_of(tables_of(feature_specs).values(), must_be_whole=False)
    readers: dict[str, list[FeatureSpec]] = {name: [] for name in layouts}
    for feature in features_of(feature_specs):
        readers[feature.table_spec.setting_in_stack.stack_name].append(feature)
    for name, layout in layouts.items():
        if any(placed_stack(table) != layout.spec for table in layout.tables):
            raise ValueError(
                f"stack {name!r} has different settings in the tables that form it; change limits with "
                "update_preprocessing_parameters, which changes all of them."
            )
        features = sorted(readers[name], key=lambda feature: feature.id_transformation.row_offset)
        layouts[name] = dataclasses.replace(
            layout,
            spec=layout.spec.replace(num_shards=num_shards),  # which a stack made by hand does not have
            features=tuple(features),
            num_devices=num_devices,
        )
        layouts[name].check_features()
    return layouts


def stacks_of(tables: Iterable[TableSpec], *, must_be_whole: bool = True) -> dict[str, StackLayout]:
    """Stacks that the tables form, by name, without features.

    Raises:
      ValueError: a table was not placed, or tables of its stack are missing that `must_be_whole`.
    """
    layouts = {}
    for name, members in get_table_stacks(list({table.name: table for table in tables}.values())).items():
        members.sort(key=lambda table: table.setting_in_stack.row_offset_in_shard)
        layout = layouts[name] = StackLayout(spec=placed_stack(members[0]), tables=tuple(members))
        present = sum(table.setting_in_stack.padded_vocab_size for table in members) if must_be_whole else None
        if present not in (None, layout.spec.stack_vocab_size):
            raise ValueError(
                f"stack {name!r} has {layout.spec.stack_vocab_size} rows, but its given tables "
                f"{sorted(table.name for table in members)} have {present}; pass all tables of the stack."
            )
    return layouts


def get_table_stacks(table_specs: Nested[TableSpec]) -> dict[str, list[TableSpec]]:
    """Tables of each stack, by its name, in the order of the given specs."""
    stacks: dict[str, list[TableSpec]] = {}
    for table in jax.tree.leaves(table_specs):
        stacks.setdefault(table.setting_in_stack.stack_name, []).append(table)
    return stacks


def leaves_like(specs: PyTree, tree: PyTree, name: str) -> list[PyTree]:
    """Leaves of `tree` in the order of those of `specs`, matched by path whatever the kinds of containers.

    Raises: ValueError: something is missing, or left over.
    """
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(specs)
    try:
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):  # other kinds of containers, or another tree
        children = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda node: node is not specs)

    def key_of(step: object) -> Hashable:
        return getattr(step, "key", getattr(step, "idx", getattr(step, "name", None)))

    wanted = {key_of(path[0]): child for path, child in children}
    found = tree if isinstance(tree, Mapping) else dict(enumerate(tree)) if isinstance(tree, list | tuple) else None
    if found is None or set(found) != set(wanted):
        has = type(tree).__name__ if found is None else f"{sorted(map(str, found))}"
        raise ValueError(
            f"{name} must have the tree structure of feature_specs, with {sorted(map(str, wanted))}; got {has}."
        )
    return [leaf for key, child in wanted.items() for leaf in leaves_like(child, found[key], f"{name}[{key!r}]")]


def check_is_array(table: TableSpec) -> None:
    """Raises: NotImplementedError: the table has a storage, which partitioned layouts do not support."""
    if table.storage is not None:
        raise NotImplementedError(
            f"table {table.name!r} has storage={type(table.storage).__name__}(...), which partitioned layouts do not "
            "know; use rsembed.EmbeddingCollection for it."
        )


def with_place(table: TableSpec, num_shards: int) -> TableSpec:
    """The table, or a copy of it in a stack of its own if it has no stack yet."""
    check_is_array(table)
    stack, setting = table.stacked_table_spec, table.setting_in_stack
    if stack is None:
        planned = plan_stack(FeatureSpec(table.name, table), [table.name], stack_name=table.name, num_shards=num_shards)
        stack, setting = planned.spec, planned.tables[0].setting
    elif stack.num_shards:
        return table
    table = dataclasses.replace(table)
    table.setting_in_stack, table.stacked_table_spec = setting, stack.replace(num_shards=num_shards)
    return table


def placed_stack(table: TableSpec) -> StackedTableSpec:
    """The stack of a table. Raises: ValueError: the table has not been placed."""
    if table.stacked_table_spec is None:
        raise ValueError(
            f"table {table.name!r} has no place in a stack yet; call prepare_feature_specs_for_training on the feature "
            "specs first."
        )
    return table.stacked_table_spec
