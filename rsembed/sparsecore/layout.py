"""Layouts of table stacks: which shard has which rows, and how large the input buffers are.

`D` devices with `C` cores each make `S = D * C` shards. Row `id` of a table belongs to shard
`(id + rotation) % S`. Device `k` holds shards `k * C` to `k * C + C - 1` of every stack, in this
order.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, Union

import jax
import numpy as np
from jaxtyping import Array, PyTree

from rsembed.checks import PositiveInt, check_type
from rsembed.specs import (
    FeatureIdTransformation,
    FeatureSpec,
    StackedTableSpec,
    TableSpec,
    features_of,
    tables_of,
)
from rsembed.stacking import (
    SUBLANES,
    FeaturePlacement,
    StackPlan,
    TablePlacement,
    place_of,
    plan_stack,
    round_up,
)
from rsembed.storage.row_layout import RowLayout

T = TypeVar("T")
# Type of a tree: `Nested[FeatureSpec]` is a FeatureSpec, or nested lists and dicts of FeatureSpecs.
Nested = Union[T, Sequence[Any], Mapping[Any, Any]]  # noqa: UP007  (X | Y cannot be subscripted)

FeatureTree: TypeAlias = PyTree
"""Values for all features, such as ids or weights, in a tree like the feature specs."""
ArrayLike = jax.Array | np.ndarray
Scalar = ArrayLike | float
"""A number that may be traced, such as the index of a step."""
MAX_MINIBATCHES = 64
MAX_SAMPLES_PER_DEVICE = 2**26 - 1
CORES_VARIABLE = "RSEMBED_CORES_PER_DEVICE"
EMULATED_CORES = 4
"""Number of cores that a device without SparseCores emulates by default, as on a TPU v5p."""

NUM_SC_PER_DEVICE_MAP = {"TPU v5": 4, "TPU v5p": 4, "TPU v6 lite": 2, "TPU v6e": 2, "TPU7x": 2}
"""Number of SparseCores per device, by `device_kind`."""


def num_sparsecores_per_device(device: jax.Device | None = None) -> int:
    """Number of SparseCores of a device: 4 on TPU v5p, 2 on TPU v6e and TPU7x.

    CPUs and GPUs emulate 4 cores, like a TPU v5p, unless the environment variable
    `RSEMBED_CORES_PER_DEVICE` contains another number. Activations and updates do not depend on the
    number of cores, but limits and statistics do.

    Args:
      device: the device, by default the first of `jax.devices()`.

    Raises: ValueError: the TPU is of an unknown kind, or `RSEMBED_CORES_PER_DEVICE` is not a number
      of cores.
    """
    if device is None:
        device = jax.devices()[0]
    if device.platform == "tpu":
        if device.device_kind not in NUM_SC_PER_DEVICE_MAP:
            raise ValueError(
                f"{device.device_kind!r} is not known to have SparseCores (known: "
                f"{', '.join(NUM_SC_PER_DEVICE_MAP)}); pass num_sc_per_device to lay tables out "
                "as if it had."
            )
        return NUM_SC_PER_DEVICE_MAP[device.device_kind]
    return number_from_environment(CORES_VARIABLE, EMULATED_CORES)


def number_from_environment(variable: str, default: int) -> int:
    """The number in an environment variable, or `default` if the variable is not set.

    Raises: ValueError: the environment variable is not a positive integer.
    """
    text = os.environ.get(variable) or str(default)
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{variable} must be a number of at least 1, such as 4, got {text!r}.")
    return int(text)


def resolve_cores(num_sc_per_device: int | None, global_device_count: int) -> int:
    """Cores per device: `num_sc_per_device`, or if it is None `num_sparsecores_per_device()`."""
    check_type(global_device_count, PositiveInt, "global_device_count")
    check_type(num_sc_per_device, PositiveInt | None, "num_sc_per_device")
    if num_sc_per_device is None:
        return num_sparsecores_per_device()
    return int(num_sc_per_device)


ShardingStrategy = enum.Enum("ShardingStrategy", "MOD")
"""Rules that assign rows to shards."""


def sharding_strategy_to_enum(sharding_strategy: str) -> ShardingStrategy:
    """Member of `ShardingStrategy` for the name "MOD", in upper or lower case.

    Raises: ValueError: `sharding_strategy` is not "MOD".
    """
    if not isinstance(sharding_strategy, str) or sharding_strategy.upper() != "MOD":
        raise ValueError(f"unknown sharding strategy {sharding_strategy!r}; the only one is 'MOD'.")
    return ShardingStrategy.MOD


_PLACE_AGAIN = (
    "A stack serves just the features that it was placed with, all of them, unchanged and not "
    "copied. For other batch sizes or more features, make new TableSpecs and FeatureSpecs of all "
    "and place them by the same calls: variables go with both."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """Tables and features of a stack, and the number of devices that share the stack.

    Tables are in the order of their rows in the stack, and features in the order of their samples.

    Functions that need only the rows of a stack leave `features` empty.
    """

    spec: StackedTableSpec
    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...] = ()
    num_devices: int

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
        """Number of SparseCores of one device, which is also the number of shards on the device."""
        return self.num_shards // self.num_devices

    @property
    def rows_per_shard(self) -> int:
        """Number of rows of the stack in each shard, including padding rows."""
        return self.spec.stack_vocab_size // self.num_shards

    @property
    def samples_per_core(self) -> int:
        """Number of samples that one core handles, summed over all features."""
        return self.spec.total_sample_count // self.num_shards

    @property
    def declared_ids(self) -> int | None:
        """Number of ids in one device's part of a batch, according to the specs of the features.

        None if a feature does not declare its number of ids per sample.
        """
        num_ids = 0
        for feature in self.features:
            shape = feature.input_shape
            if shape is None or None in shape:
                return None
            num_ids += math.prod(shape)
        return num_ids // self.num_devices

    @property
    def plan(self) -> StackPlan:
        """Tables and features of the stack with their offsets, as a `StackPlan`."""
        return StackPlan(
            spec=self.spec,
            dtype=self.tables[0].dtype,
            tables=tuple(TablePlacement.of(table, table.setting_in_stack) for table in self.tables),
            features=tuple(
                FeaturePlacement.of(feature, feature.id_transformation) for feature in self.features
            ),
        )

    @functools.cached_property
    def row_layout(self) -> RowLayout:
        """The `RowLayout` of the stack, for `DenseRows`."""
        return RowLayout.as_planned(self.plan, self.num_cores)

    def check_features(self) -> None:
        """Checks the offsets and the batch size of every feature.

        Raises: ValueError: the samples of a feature do not start directly after the samples of the
          features before it, a feature has different row offsets than its table, a batch cannot be
          split into equal parts for all shards, the stack was made for another number of samples,
          or a device has too many samples.
        """
        end = 0
        for feature in self.features:
            feature.check_pooled_as_table()
            samples = feature.num_samples or 0
            table = place_of(feature.table_spec.setting_in_stack, self.num_shards)
            expected = FeatureIdTransformation(end, table.first, table.rotation)
            if feature.id_transformation != expected:
                raise ValueError(
                    f"feature {feature.name!r} does not lie where stack {self.name!r} has room "
                    f"for it: it has {feature.id_transformation}, but {expected} comes next. "
                    f"{_PLACE_AGAIN}"
                )
            if not samples or samples % self.num_shards:
                raise ValueError(
                    f"feature {feature.name!r}: its global batch of {samples} samples cannot be "
                    f"cut into {self.num_shards} equal parts ({self.num_devices} devices x "
                    f"{self.num_cores} cores); use a multiple of {self.num_shards}, or lay tables "
                    "out with a smaller num_sc_per_device."
                )
            end += samples
        if end != self.spec.total_sample_count:
            raise ValueError(
                f"stack {self.name!r} was placed for {self.spec.total_sample_count} samples, but "
                f"features {[feature.name for feature in self.features]} have {end}. "
                f"{_PLACE_AGAIN}"
            )
        if end // self.num_devices > MAX_SAMPLES_PER_DEVICE:
            raise ValueError(
                f"stack {self.name!r} has {end // self.num_devices} samples per device, above the "
                f"limit of {MAX_SAMPLES_PER_DEVICE}; stack fewer features, or use more devices."
            )

    def checked_activations(self, activations: Array) -> Array:
        """Checks the shape of the activations (or gradients) of one device, and returns them.

        Raises: ValueError: the shape is not `[samples of one device, columns of the stack]`.
        """
        shape = (self.samples_per_core * self.num_cores, self.spec.stack_embedding_dim)
        if activations.shape != shape:
            raise ValueError(
                f"stack {self.name!r}: activations (or their gradients) have shape "
                f"{activations.shape}, expected {shape} on each of {self.num_devices} devices."
            )
        return activations

    def buffer_size_per_device(self, enable_minibatching: bool = False) -> int:
        """Size of the input buffer of one device, in entries.

        If the stack has a `suggested_coo_buffer_size_per_device`, the buffer has the suggested
        size, rounded up. Without a suggested size, the buffer has the maximum size, with room for
        `max_ids_per_partition` ids in every partition. For a stack of several tables, a suggested
        size above the maximum size is reduced to the maximum size.

        Raises: ValueError: the stack has one table, and its suggested size exceeds the maximum
          size.
        """
        max_ids = self.spec.max_ids_per_partition
        largest = coo_buffer_size(max_ids, self.num_devices, self.num_cores, enable_minibatching)
        suggested = self.spec.suggested_coo_buffer_size_per_device
        if suggested is None:
            return largest
        size = round_up(suggested, SUBLANES * self.num_cores)
        if size > largest and len(self.tables) > 1:
            # The suggested size of a stack is the sum of the suggested sizes of its tables. The sum
            # can exceed the maximum size, because all tables together share the limit
            # `max_ids_per_partition`.
            return largest
        if size > largest:
            raise ValueError(
                f"stack {self.name!r}: suggested_coo_buffer_size_per_device={suggested} (rounded "
                f"to {size}) is above {largest}, the most that max_ids_per_partition={max_ids} "
                f"can fill with {self.num_devices} devices and {self.num_cores} cores each; lower "
                "it, or leave it None."
            )
        return size


def compute_row_pointers_size_per_device(
    *,
    global_device_count: int,
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
) -> int:
    """Number of row pointers of one device for one stack.

    Each core has one row pointer per shard, and at least 8 row pointers. With minibatching, each
    core has 64 sets of row pointers, one set for every minibatch.
    """
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    pointers_per_block = max(global_device_count * num_cores, SUBLANES)
    blocks_per_core = MAX_MINIBATCHES if enable_minibatching else 1
    return pointers_per_block * num_cores * blocks_per_core


def compute_theoretical_max_coo_buffer_size(
    max_ids_per_partition: int,
    global_device_count: int,
    num_sc_per_device: int | None = None,
    enable_minibatching: bool = False,
) -> int:
    """Size of a device's buffer, in entries, for `max_ids_per_partition` ids in every partition.

    With minibatching, the size includes the partitions of all 64 minibatches.
    """
    num_cores = resolve_cores(num_sc_per_device, global_device_count)
    return coo_buffer_size(
        max_ids_per_partition, global_device_count, num_cores, enable_minibatching
    )


def coo_buffer_size(
    max_ids: int, num_devices: int, num_cores: int, enable_minibatching: bool
) -> int:
    """Same as `compute_theoretical_max_coo_buffer_size`, without its checks of the arguments.

    Checks of the arguments would take time in every batch.
    """
    blocks_per_core = MAX_MINIBATCHES if enable_minibatching else 1
    num_partitions = num_cores * num_devices * num_cores * blocks_per_core
    return round_up(max_ids, SUBLANES) * num_partitions


def cores_of(tables: Sequence[TableSpec], num_devices: int, num_sc_per_device: int | None) -> int:
    """Checks the number of shards of the tables, and returns the number of SparseCores per device.

    Args:
      tables: specs of tables that are assigned to stacks.
      num_devices: number of devices that share the tables.
      num_sc_per_device: expected number of SparseCores per device. With None, the expected number
        is the number of shards of the first table, divided by `num_devices`.

    Raises: ValueError: a table is not assigned to a stack, or was stacked for a different number of
      shards.
    """
    check_type(num_devices, PositiveInt, "global_device_count")
    if num_sc_per_device is None:
        num_shards = placed_stack(tables[0]).num_shards
        if num_shards:
            num_sc_per_device = max(1, num_shards // num_devices)
    cores = resolve_cores(num_sc_per_device, num_devices)
    for table in tables:
        placed = placed_stack(table).num_shards
        if placed not in (0, num_devices * cores):
            raise ValueError(
                f"table {table.name!r} was laid out for another number of shards: {placed}, not "
                f"{num_devices * cores} (devices times cores). Use the global_device_count and "
                "num_sc_per_device that it was placed with (None takes the latter from the "
                "specs), or place new specs."
            )
    return cores


def stack_layouts(
    feature_specs: Nested[FeatureSpec], *, num_devices: int, num_cores: int | None
) -> dict[str, StackLayout]:
    """Checks that features match their stacks, and returns the layouts of the stacks by stack name.

    Stacks are sorted by the first feature that reads each stack.

    Args:
      feature_specs: specs of all features, with their tables already assigned to stacks.
      num_devices: number of devices that share the tables.
      num_cores: expected number of SparseCores per device. With None, the expected number is the
        number of shards of the first table, divided by `num_devices`.

    Raises:
      ValueError: a table is not assigned to a stack, or was stacked for a different number of
        shards or for other features, or a batch cannot be split into equal parts.
    """
    tables = tables_of(feature_specs).values()
    layouts = stacks_of(tables, num_devices, num_cores, must_be_whole=False)
    readers: dict[str, list[FeatureSpec]] = {name: [] for name in layouts}
    for feature in features_of(feature_specs):
        readers[feature.table_spec.setting_in_stack.stack_name].append(feature)
    for name, layout in layouts.items():
        first = placed_stack(layout.tables[0])
        if any(placed_stack(table) != first for table in layout.tables):
            raise ValueError(
                f"stack {name!r} has different settings in the tables that form it; change limits "
                "with update_preprocessing_parameters, which changes all of them."
            )
        features = sorted(readers[name], key=lambda feature: feature.id_transformation.row_offset)
        layouts[name] = dataclasses.replace(layout, features=tuple(features))
        layouts[name].check_features()
    return layouts


def stacks_of(
    tables: Iterable[TableSpec],
    num_devices: int,
    num_cores: int | None,
    *,
    must_be_whole: bool = True,
) -> dict[str, StackLayout]:
    """Layouts of the stacks that contain `tables`, by stack name, without features.

    Args:
      tables: specs of tables that are assigned to stacks.
      num_devices: number of devices that share the tables.
      num_cores: expected number of SparseCores per device, see `cores_of`.
      must_be_whole: whether `tables` must include all tables of each stack, True by default. If
        False, each layout contains only the tables of the stack that are in `tables`.

    Raises: ValueError: a table is not assigned to a stack, or was stacked for a different number of
      shards, or `must_be_whole` is True and a table of a stack is missing.
    """
    unique_tables = list({table.name: table for table in tables}.values())
    cores = cores_of(unique_tables, num_devices, num_cores)
    # Fingerprints and the C++ partitioner do not take NumPy integers.
    num_devices = int(num_devices)
    num_shards = num_devices * cores
    layouts = {}
    for name, members in get_table_stacks(unique_tables).items():
        members.sort(key=lambda table: table.setting_in_stack.row_offset_in_shard)
        # If a user constructed the `StackedTableSpec`, its `num_shards` is not set yet.
        spec = placed_stack(members[0]).replace(num_shards=num_shards)
        num_rows = sum(table.setting_in_stack.padded_vocab_size for table in members)
        if must_be_whole and num_rows != spec.stack_vocab_size:
            raise ValueError(
                f"stack {name!r} has {spec.stack_vocab_size} rows, but its given tables "
                f"{sorted(table.name for table in members)} have {num_rows}; pass all tables of "
                "the stack."
            )
        layouts[name] = StackLayout(spec=spec, tables=tuple(members), num_devices=num_devices)
    return layouts


def get_table_stacks(table_specs: Nested[TableSpec]) -> dict[str, list[TableSpec]]:
    """Tables of each stack, by stack name, in the order of `table_specs`."""
    stacks: dict[str, list[TableSpec]] = {}
    for table in jax.tree.leaves(table_specs):
        stacks.setdefault(table.setting_in_stack.stack_name, []).append(table)
    return stacks


def entry_of(entries: Mapping[str, T], name: str, what: str) -> T:
    """`entries[name]`, with `what` as the name of `entries` in the error message.

    Raises: ValueError: `entries` has no entry `name`.
    """
    if name not in entries:
        raise ValueError(f"{what} have no {name!r}, only {sorted(entries)}.")
    return entries[name]


def leaves_like(specs: PyTree, tree: PyTree, name: str) -> list[PyTree]:
    """Leaves of `tree` in the order of the leaves of `specs`.

    A leaf of `tree` belongs to the leaf of `specs` with the same path. A container in `tree` may be
    of another type than in `specs`, for example a tuple instead of a list.

    Args:
      specs: tree that defines order and paths of the leaves.
      tree: tree with the leaves to return.
      name: name of `tree` in error messages.

    Raises: ValueError: `tree` has missing or additional entries.
    """
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(specs)
    try:
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):
        # `flatten_up_to` fails if the trees have different entries, and also if only the types of
        # their containers differ. To allow different types of containers, the code below compares
        # the entries of the outermost containers, then the contents of each entry recursively.
        children = jax.tree_util.tree_leaves_with_path(
            specs, is_leaf=lambda node: node is not specs
        )
    spec_of_key = {jax.tree_util.keystr(path, simple=True): child for path, child in children}
    pairs: Iterable[tuple[object, PyTree]] = ()
    if isinstance(tree, Mapping):
        pairs = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    entries = {str(key): entry for key, entry in pairs}
    if set(entries) != set(spec_of_key):
        has = sorted(entries) or type(tree).__name__
        raise ValueError(
            f"{name} must have the tree structure of feature_specs, with {sorted(spec_of_key)}; got {has}."
        )
    leaves = []
    for key, child in spec_of_key.items():
        leaves += leaves_like(child, entries[key], f"{name}[{key}]")
    return leaves


def check_is_array(table: TableSpec) -> None:
    """Checks that a table is a plain array, the only storage that `rsembed.sparsecore` supports.

    Raises: NotImplementedError: the table has a `storage`.
    """
    if table.storage is not None:
        raise NotImplementedError(
            f"table {table.name!r} has storage={type(table.storage).__name__}(...), which "
            "partitioned layouts do not know; use rsembed.EmbeddingCollection for it."
        )


def with_place(table: TableSpec, num_shards: int) -> TableSpec:
    """The table if its stack and number of shards are set, else a copy in which both are set.

    The stack of a copied table has `num_shards` shards. If the table has no stack, the copied table
    is the only table of a new stack with the table's name.
    """
    check_is_array(table)
    stack = table.stacked_table_spec
    setting = table.setting_in_stack
    if stack is None:
        feature = FeatureSpec(table.name, table)
        planned = plan_stack(feature, [table.name], stack_name=table.name, num_shards=num_shards)
        stack = planned.spec
        setting = planned.tables[0].setting
    elif stack.num_shards:
        return table
    table = dataclasses.replace(table)
    table.setting_in_stack = setting
    table.stacked_table_spec = stack.replace(num_shards=num_shards)
    return table


def placed_stack(table: TableSpec) -> StackedTableSpec:
    """Spec of the stack that a table is assigned to.

    Raises: ValueError: the table is not assigned to a stack yet.
    """
    if table.stacked_table_spec is None:
        raise ValueError(
            f"table {table.name!r} has no place in a stack yet; call "
            "prepare_feature_specs_for_training on the feature specs first."
        )
    return table.stacked_table_spec
