"""Where things lie: shards, stacks and sizes, read from specs that a stacking function has placed.

`D` devices with `C` cores each make `S = D * C` shards. Row `id` of a table lies in shard `(id + rotation) % S`; device
`k` holds shards `k * C` to `k * C + C - 1` of every stack, one after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rsembed.specs import FeatureSpec, StackedTableSpec, TableSpec, features_of
from rsembed.stacking import SUBLANES, round_up

MAX_MINIBATCHES = 64
MAX_SAMPLES_PER_DEVICE = 2**26 - 1
EMULATED_SHARDS = 32
"""Shards laid out where there are no SparseCores, over all devices together."""

_CORES_BY_DEVICE_KIND = {"TPU v5": 4, "TPU v5p": 4, "TPU v6 lite": 2, "TPU v6e": 2, "TPU7x": 2}


def cores_per_device(device: jax.Device | None = None, *, global_device_count: int | None = None) -> int:
    """SparseCores of a device; elsewhere, the number that is laid out as if.

    Limits such as `max_ids_per_partition` count the entries between one core and one shard, so a layout of few shards
    would exceed limits that were written for a pod. Machines without SparseCores therefore lay out 32 shards in
    total (at least one per device): the same shards, limits and statistics for 1, 2, 4, 8, 16 or 32 devices. Pass any
    other `num_sc_per_device >= 1` to the functions of this wing for another layout; results do not depend on it.

    Args:
      device: None means the first device.
      global_device_count: devices that share the tables; None means all of the device's platform.
    """
    device = jax.devices()[0] if device is None else device
    if device.platform == "tpu":
        if device.device_kind not in _CORES_BY_DEVICE_KIND:
            raise ValueError(
                f"{device.device_kind!r} is not known to have SparseCores (known: {', '.join(_CORES_BY_DEVICE_KIND)}); "
                "pass num_sc_per_device to lay tables out as if it had."
            )
        return _CORES_BY_DEVICE_KIND[device.device_kind]
    return max(1, EMULATED_SHARDS // (global_device_count or jax.device_count(device.platform)))


def resolve_cores(num_sc_per_device: int | None, global_device_count: int) -> int:
    """`num_sc_per_device`, checked, or the default of this machine."""
    if global_device_count < 1:
        raise ValueError(f"global_device_count must be at least 1, got {global_device_count}.")
    if num_sc_per_device is None:
        return cores_per_device(global_device_count=global_device_count)
    if num_sc_per_device < 1:
        raise ValueError(f"num_sc_per_device must be at least 1, got {num_sc_per_device}.")
    return num_sc_per_device


def check_sharding_strategy(sharding_strategy: str) -> None:
    """Raises: ValueError: it is not "MOD", in any case."""
    if not isinstance(sharding_strategy, str) or sharding_strategy.upper() != "MOD":
        raise ValueError(f"unknown sharding strategy {sharding_strategy!r}; the only one is 'MOD'.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """One stack with the features that read it, in the order of their samples, and its sizes for `S` shards."""

    spec: StackedTableSpec
    features: tuple[FeatureSpec, ...]
    num_devices: int
    num_cores: int

    @property
    def name(self) -> str:
        """The stack's name."""
        return self.spec.stack_name

    @property
    def num_shards(self) -> int:
        """Shards over all devices."""
        return self.num_devices * self.num_cores

    @property
    def rows_per_shard(self) -> int:
        """Rows of the physical table in one shard."""
        return self.spec.stack_vocab_size // self.num_shards

    @property
    def samples_per_core(self) -> int:
        """Samples of all features together that one core serves."""
        return self.spec.total_sample_count // self.num_shards

    def buffer_size_per_device(self, enable_minibatching: bool = False) -> int:
        """Places in a device's input buffer; with room for every minibatch, unless a smaller size is suggested.

        Raises: ValueError: the suggested size is more than the limits could ever fill.
        """
        max_ids = self.spec.max_ids_per_partition
        largest = coo_buffer_size(max_ids, self.num_devices, self.num_cores, enable_minibatching)
        suggested = self.spec.suggested_coo_buffer_size_per_device
        if suggested is None:
            return largest
        size = round_up(suggested, SUBLANES * self.num_cores)
        if size > largest and len({feature.table_spec.name for feature in self.features}) > 1:
            return largest  # the sizes of several tables were added, their limits were not
        if size > largest:
            raise ValueError(
                f"stack {self.name!r}: suggested_coo_buffer_size_per_device={suggested} (rounded to {size}) is above "
                f"{largest}, the most that max_ids_per_partition={max_ids} can fill with "
                f"{self.num_devices} devices and {self.num_cores} cores each; lower it, or leave it None."
            )
        return size


def row_pointers_size(num_devices: int, num_cores: int, enable_minibatching: bool = False) -> int:
    """Row pointers a device has: one block of at least 8 per core, or per core and minibatch."""
    return max(num_devices * num_cores, SUBLANES) * num_cores * (MAX_MINIBATCHES if enable_minibatching else 1)


def coo_buffer_size(
    max_ids_per_partition: int, num_devices: int, num_cores: int, enable_minibatching: bool = False
) -> int:
    """Places a device needs when every partition (of every minibatch) is as full as its limit allows."""
    num_partitions = num_cores * num_devices * num_cores * (MAX_MINIBATCHES if enable_minibatching else 1)
    return round_up(max_ids_per_partition, SUBLANES) * num_partitions


def cores_from_row_pointers(size_per_device: int, num_devices: int, enable_minibatching: bool = False) -> int:
    """The cores per device for which a device has that many row pointers.

    Raises: ValueError: no number of cores fits.
    """
    num_cores = 1
    while row_pointers_size(num_devices, num_cores, enable_minibatching) < size_per_device:
        num_cores += 1
    if row_pointers_size(num_devices, num_cores, enable_minibatching) != size_per_device:
        raise ValueError(
            f"{size_per_device} row pointers per device do not fit {num_devices} devices with any number of cores; was "
            "the input preprocessed for another global_device_count, or passed without shard_map?"
        )
    return num_cores


def stack_layouts(feature_specs: Any, *, num_devices: int, num_cores: int | None) -> dict[str, StackLayout]:
    """The stacks that `feature_specs` read, by name, in leaf order; None takes this machine's number of cores.

    Raises:
      ValueError: a table was not placed yet, or for another number of shards.
    """
    num_cores = resolve_cores(num_cores, num_devices)
    stacks: dict[str, StackedTableSpec] = {}
    readers: dict[str, list[FeatureSpec]] = {}
    for feature in features_of(feature_specs):
        spec = placed_stack(feature.table_spec)
        if stacks.setdefault(spec.stack_name, spec) != spec:
            raise ValueError(
                f"stack {spec.stack_name!r} has different settings in the tables that form it; change limits with "
                "update_preprocessing_parameters, which changes all of them."
            )
        readers.setdefault(spec.stack_name, []).append(feature)
    layouts = {}
    for name, spec in stacks.items():
        features = sorted(readers[name], key=lambda feature: feature.id_transformation.row_offset)
        layout = StackLayout(spec=spec, features=tuple(features), num_devices=num_devices, num_cores=num_cores)
        _check_layout(layout)
        layouts[name] = layout
    return layouts


def _check_layout(layout: StackLayout) -> None:
    num_shards, name = layout.num_shards, layout.name
    sizes = {name: layout.spec.stack_vocab_size} | {
        feature.table_spec.name: feature.table_spec.setting_in_stack.padded_vocab_size for feature in layout.features
    }
    for table, rows in sizes.items():
        if rows % (SUBLANES * num_shards):
            raise ValueError(
                f"table {table!r} was laid out for another number of shards: its {rows} padded rows are no multiple of "
                f"8 * {num_shards} shards ({layout.num_devices} devices x {layout.num_cores} cores). Use the same "
                "global_device_count and num_sc_per_device as in prepare_feature_specs_for_training."
            )
    for feature in layout.features:
        if feature.num_samples is None or feature.num_samples % num_shards:
            raise ValueError(
                f"feature {feature.name!r}: its global batch of {feature.num_samples} samples cannot be cut into "
                f"{num_shards} equal parts ({layout.num_devices} devices x {layout.num_cores} cores); use a "
                f"multiple of {num_shards}, or lay tables out with a smaller num_sc_per_device."
            )


def placed_stack(table: TableSpec) -> StackedTableSpec:
    """The stack of a table. Raises: ValueError: it has none yet."""
    if table.stacked_table_spec is None:
        raise ValueError(
            f"table {table.name!r} has no place in a stack yet; call prepare_feature_specs_for_training on the feature "
            "specs first."
        )
    return table.stacked_table_spec
