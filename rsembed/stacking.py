"""Computes stacking plans, which place the rows of several logical tables in one physical table.

A plan is frozen, hashable by value (including limits) and printable. The functions of
`rsembed.sparsecore.table_stacking`, which change specs in place as in jax-tpu-embedding, store the
plan in the specs. A plan describes one of two layouts:

* The layout for SparseCores pads dims to multiples of 8 and rows to multiples of `8 * num_shards`.
  Consecutive ids of a table are in different shards. The tables of a stack can be rotated, so that
  their first rows are in different shards.
* The layout for `EmbeddingCollection` (`num_shards=1`, no padding) concatenates tables of equal
  dim, dtype and optimizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from rsembed.checks import PositiveInt, check_type, did_you_mean, validated
from rsembed.places import Place
from rsembed.specs import (
    DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
    MAX_ROWS,
    Combiner,
    FeatureIdTransformation,
    FeatureSpec,
    StackedTableSpec,
    TableSettingInStack,
    TableSpec,
    features_of,
    tables_of,
)

LimitsCallable = Callable[[str, int], int]
Size = TypeVar("Size", int, np.ndarray, jax.Array)
Name = TypeVar("Name", str, int)
SUBLANES = 8
"""Tile size of a TPU, to which SparseCore layouts pad rows and columns."""
MAX_STACK_NAME_LENGTH = 50


def round_up(value: Size, multiple: int) -> Size:
    """The smallest multiple of `multiple` that is not below `value`, for a number or an array."""
    return -(-value // multiple) * multiple


def get_default_limits(name: str, batch_size: int) -> int:
    """Default limit of ids per partition, 256, for a stack of several tables."""
    del name, batch_size
    return 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """One logical table, without padding in `dim` and `rows`, and its offsets in a stack."""

    name: str
    rows: int
    dim: int
    dtype: str
    stochastic_rounding: bool
    setting: TableSettingInStack

    @classmethod
    def of(cls, table: TableSpec, setting: TableSettingInStack) -> TablePlacement:
        """Placement of `table`, with the stack, the padded size and the offsets in `setting`."""
        return cls(
            name=table.name,
            rows=table.vocabulary_size,
            dim=table.embedding_dim,
            dtype=table.dtype,
            stochastic_rounding=table.stochastic_rounding,
            setting=setting,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturePlacement:
    """One feature, its table, and its offset in the stacked batch.

    Args:
      name: name of the feature.
      table_name: name of the table that the feature reads.
      combiner: how the looked-up rows are pooled. Packages such as `rsembed.tbe` may set
        `mean_by_count`, which divides by the number of ids.
      num_samples: number of samples in the global batch, or None if no shape is declared.
      transformation: offset and rotation of the feature in the stack.
    """

    name: str
    table_name: str
    combiner: Combiner | Literal["mean_by_count"]
    num_samples: int | None
    transformation: FeatureIdTransformation

    @classmethod
    def of(cls, feature: FeatureSpec, transformation: FeatureIdTransformation) -> FeaturePlacement:
        """Placement of `feature`, with the offsets and the rotation in `transformation`."""
        return cls(
            name=feature.name,
            table_name=feature.table_spec.name,
            combiner=feature.pooling,
            num_samples=feature.num_samples,
            transformation=transformation,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """One physical table, and the logical tables and features in it."""

    spec: StackedTableSpec
    dtype: str
    tables: tuple[TablePlacement, ...]
    features: tuple[FeaturePlacement, ...]
    num_stored_values: tuple[int, int] | None = None
    """Number of values in the table and in its slots, or None for tables without a `storage`."""

    @property
    def name(self) -> str:
        """The name of the stack."""
        return self.spec.stack_name

    @property
    def table_bytes(self) -> int:
        """Total size of the physical table on all devices, in bytes."""
        num_values = self.spec.stack_vocab_size * self.spec.stack_embedding_dim
        if self.num_stored_values:
            num_values = self.num_stored_values[0]
        return num_values * jnp.dtype(self.dtype).itemsize

    @property
    def slot_bytes(self) -> int:
        """Total size of the optimizer state on all devices, in bytes."""
        if self.num_stored_values is not None:
            return self.num_stored_values[1] * 4
        row = jax.ShapeDtypeStruct((1, self.spec.stack_embedding_dim), jnp.float32)
        slots = jax.eval_shape(self.spec.optimizer.init_slots, row)
        return self.spec.stack_vocab_size * sum(slot.size for slot in slots) * 4

    @property
    def padding_fraction(self) -> float:
        """Fraction of the physical table that is padding."""
        used = sum(table.rows * table.dim for table in self.tables)
        return 1.0 - used / (self.spec.stack_vocab_size * self.spec.stack_embedding_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackingPlan:
    """Placements of all tables and features of a model.

    Two plans are equal only if all their values are equal, including the limits of the stacks.
    """

    num_shards: int
    stacks: tuple[StackPlan, ...]

    def stack(self, name: str) -> StackPlan:
        """The stack named `name`.

        Raises: KeyError: the plan has no such stack.
        """
        for stack in self.stacks:
            if stack.name == name:
                return stack
        known = [stack.name for stack in self.stacks]
        raise KeyError(f"no stack {name!r}{did_you_mean(name, known)}; the plan has {known}.")

    def table(self, name: str) -> tuple[StackPlan, TablePlacement]:
        """The stack of the logical table `name`, and the placement of this table in the stack.

        Raises: KeyError: the plan has no such table.
        """
        tables: dict[str, tuple[StackPlan, TablePlacement]] = {}
        for stack in self.stacks:
            for table in stack.tables:
                tables[table.name] = (stack, table)
        if name not in tables:
            raise KeyError(
                f"no table {name!r}{did_you_mean(name, tables)}; the plan has {list(tables)}."
            )
        return tables[name]

    def flat_rows(self, table_name: str, ids: object) -> Any:
        """Row of each id in the flat stacked array."""
        stack, table = self.table(table_name)
        place = place_of(table.setting, self.num_shards)
        rows_per_shard = stack.spec.stack_vocab_size // self.num_shards
        return place.rows(ids, spread=self.num_shards, rows_per_shard=rows_per_shard)

    def shard_load(
        self, ids_by_feature: Mapping[str, object]
    ) -> dict[str, Int[np.ndarray, " shard"]]:
        """Number of ids that each shard looks up, as one array for each stack, by stack name.

        The skew is the largest load divided by the mean load. A large skew costs time, because all
        shards wait for the busiest shard. The skew is large if frequent ids of several tables are
        in one shard. To reduce the skew, choose a `rotation` that puts frequent ids of different
        tables into different shards.

        Args:
          ids_by_feature: ids of one or more batches, as arrays or lists, by feature name. A feature
            without ids may be missing in `ids_by_feature`.

        Raises: ValueError: a feature is unknown, or an id is outside its table.
        """
        known = {feature.name for stack in self.stacks for feature in stack.features}
        unknown = sorted(set(ids_by_feature) - known)
        if unknown:
            raise ValueError(f"shard_load: no feature {unknown}; the plan has {sorted(known)}.")
        loads = {}
        for stack in self.stacks:
            load = np.zeros(self.num_shards, np.int64)
            for feature in stack.features:
                _, table = self.table(feature.table_name)
                ids = _checked_flat_ids(ids_by_feature.get(feature.name, ()), feature.name, table)
                place = place_of(table.setting, self.num_shards)
                shards = place.shards(ids, spread=self.num_shards)
                load += np.bincount(shards, minlength=self.num_shards)
            loads[stack.name] = load
        return loads

    def describe(self, ids_by_feature: Mapping[str, Any] | None = None) -> str:
        """Description of the plan: memory and padding of each stack.

        Args:
          ids_by_feature: ids of one or more batches, see `shard_load`. If `ids_by_feature` is
            given, the description also has the number of ids, the busiest shard and the skew of
            each stack. None by default.
        """
        rows = self._cells()
        if ids_by_feature is not None:
            load_rows = [("ids", "busiest shard", "skew")]
            for load in self.shard_load(ids_by_feature).values():
                num_ids = load.sum()
                skew = load.max() * load.size / max(num_ids, 1)
                load_rows.append((f"{num_ids:,}", str(load.argmax()), f"{skew:.2f}"))
            rows = [row + load_row for row, load_row in zip(rows, load_rows, strict=True)]
        columns = zip(*rows, strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for row in rows:
            padded_cells = map(str.ljust, row, widths)
            line = "  ".join(padded_cells)
            lines.append(line.rstrip())
        return "\n".join(lines)

    __str__ = describe

    def _repr_html_(self) -> str:
        columns, *rows = self._cells()
        html_rows = [_html_row("th", columns)]
        for row in rows:
            html_rows.append(_html_row("td", row))
        return f"<table>{''.join(html_rows)}</table>"

    def _cells(self) -> list[tuple[str, ...]]:
        """Cells of the table that `describe` prints: the column names, then one row per stack."""
        stack_columns = ("stack", "tables", "features", "rows", "dim", "dtype", "optimizer")
        rows = [
            (
                stack.name,
                str(len(stack.tables)),
                str(len(stack.features)),
                f"{stack.spec.stack_vocab_size:,}",
                str(stack.spec.stack_embedding_dim),
                stack.dtype,
                stack.spec.optimizer.short_name(),
                f"{stack.padding_fraction:.1%}",
                f"{stack.table_bytes / self.num_shards / 1e6:,.2f}",
                f"{stack.slot_bytes / self.num_shards / 1e6:,.2f}",
            )
            for stack in self.stacks
        ]
        return [(*stack_columns, "padding", "table MB/shard", "slots MB/shard"), *rows]


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _checked_flat_ids(
    ids: Any, feature_name: str, table: TablePlacement
) -> Int[np.ndarray, " nnz"]:
    """Dense, ragged or single ids of a feature in one flat array.

    Raises: ValueError: an id is not an integer, or is outside the table.
    """
    # Empty lists are left out: NumPy converts `[]` to an array of floats, and `np.concatenate`
    # would then convert all ids to floats.
    rows = [np.zeros(0, np.int64)]
    for row in map(np.ravel, ids):
        if row.size:
            rows.append(row)
    flat = np.concatenate(rows)
    is_row = np.zeros(flat.shape, bool)
    if flat.dtype.kind in "iu":
        is_row = (flat >= 0) & (flat < table.rows)
    if not is_row.all():
        raise ValueError(
            f"shard_load: feature {feature_name!r}: ids must be integers from 0 to "
            f"{table.rows - 1}, the rows of table {table.name!r}, got {flat[~is_row][:3].tolist()}."
        )
    return flat


def place_of(setting: TableSettingInStack, num_shards: int) -> Place:
    """Position of a table in the shards of its stack, computed from the offsets in `setting`."""
    return Place(0, setting.row_offset_in_shard * num_shards, setting.shard_rotation)


@validated
def plan_stacking(
    features: object,
    *,
    num_shards: PositiveInt = 1,
    groups: Sequence[Sequence[str]] | None = None,
    pad: bool = True,
    rotation: int = 0,
    activation_mem_bytes_limit: PositiveInt | None = None,
    use_short_stack_names: bool = True,
) -> StackingPlan:
    """Plan for all tables that `features` read, without changes to `features`.

    Args:
      features: FeatureSpecs, nested in lists or dicts.
      num_shards: number of shards (devices times cores per device), 1 by default.
      groups: table names of every stack. If None, the default, tables of equal dim, dtype,
        optimizer, rounding and quantization form a stack. With `pad=True`, tables of the default
        stacks have equal padded dims and equal combiners.
      pad: whether dims are padded to multiples of 8 and rows to multiples of `8 * num_shards`, as
        SparseCores require. True by default. If False, `num_shards` must be 1.
      rotation: number of shards by which the ids of each table are shifted relative to the
        preceding table of the stack, 0 by default. A rotation puts the first rows of the tables,
        which are often frequent, into different shards.
      activation_mem_bytes_limit: maximum bytes of activations per shard in one stack. If None, the
        default, there is no limit.
      use_short_stack_names: whether a stack name of more than 50 characters is shortened to 50
        characters and a hash, True by default.

    Raises:
      ValueError: the groups do not name every table exactly once, or a stack has too many rows.
      NotImplementedError: `pad` is True, and a table has a `storage`.
    """
    if not pad and num_shards != 1:
        raise ValueError("a plan without padding has one shard; use pad=True for several.")
    tables = tables_of(features)
    if groups is None:
        groups = group_tables(
            features,
            num_shards=num_shards,
            pad=pad,
            activation_mem_bytes_limit=activation_mem_bytes_limit,
        )
    stored = [name for name, table in tables.items() if table.storage is not None]
    if pad and stored:
        raise NotImplementedError(
            f"tables {stored} have storage=, which stacked and sharded layouts do not know; use EmbeddingCollection."
        )
    named = [name for group in groups for name in group]
    if sorted(named) != sorted(tables):
        raise ValueError(
            f"groups must name every table once: tables {sorted(tables)}, groups {sorted(named)}."
        )
    return plan_groups(
        features,
        groups,
        num_shards=num_shards,
        pad=pad,
        rotation=rotation,
        use_short_stack_names=use_short_stack_names,
    )


def plan_groups(
    features: Any,
    groups: Sequence[Sequence[str]],
    *,
    num_shards: int,
    use_short_stack_names: bool = True,
    **options: Any,
) -> StackingPlan:
    """A plan with one stack for each group of table names.

    The plan has only the tables in `groups`. `options` are keyword arguments of `plan_stack`.
    """
    names = [stack_name_of(group, use_short_stack_names=use_short_stack_names) for group in groups]
    stacks = []
    for name, group in zip(names, groups, strict=True):
        if names.count(name) > 1:
            name = stack_name_of(group, is_taken=True)
        stacks.append(
            plan_stack(features, group, stack_name=name, num_shards=num_shards, **options)
        )
    return StackingPlan(num_shards=num_shards, stacks=tuple(stacks))


def stack_name_of(
    table_names: Sequence[str], *, is_taken: bool = False, use_short_stack_names: bool = True
) -> str:
    """Name of a stack: table names joined by `_`.

    A joined name of more than 50 characters is shortened to its first 50 characters and a hash.

    Args:
      table_names: names of the tables of the stack.
      is_taken: whether another stack already has the joined name. For example, a stack of the
        tables `user` and `item` and a stack of the single table `user_item` have the same joined
        name. If True, a name of any length ends with a hash. False by default.
      use_short_stack_names: whether names of more than 50 characters are shortened. True by
        default.
    """
    full = "_".join(table_names)
    if not is_taken and (not use_short_stack_names or len(full) <= MAX_STACK_NAME_LENGTH):
        return full
    hashed = "\0".join(table_names) if is_taken else full
    return f"{full[:MAX_STACK_NAME_LENGTH]}...{hashlib.sha256(hashed.encode()).hexdigest()[:12]}"


def group_tables(
    features: object,
    *,
    num_shards: int,
    pad: bool = True,
    activation_mem_bytes_limit: int | None = DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
) -> list[list[str]]:
    """Groups of tables that can share a physical table, by name, in the order of the features.

    A group is split if its tables have more than `MAX_ROWS` rows, or if the activations of its
    tables have more than `activation_mem_bytes_limit` bytes per shard.
    """
    tables = tables_of(features)
    groups: dict[Any, list[str]] = {}
    for name, table in tables.items():
        dim = round_up(table.embedding_dim, SUBLANES) if pad else table.embedding_dim
        storage_key = None
        if table.storage is not None:
            storage_key = table.storage.sharing_key(table) or name
        key = (
            dim,
            table.optimizer,
            table.combiner if pad else None,
            table.quantization_config,
            table.dtype,
            table.stochastic_rounding,
            # Padding columns would change the updates of a row-wise optimizer. Tables with a
            # row-wise optimizer are in one group only if their dims are equal without padding.
            table.embedding_dim if table.optimizer.is_row_wise else None,
            storage_key,
        )
        groups.setdefault(key, []).append(name)
    row_tile = SUBLANES * num_shards if pad else 1
    num_rows = {}
    for name, table in tables.items():
        # A hash table has up to four hash slots per row, and at most `MAX_ROWS` hash slots are
        # possible. To stay below `MAX_ROWS`, each row of a table with a storage counts as eight
        # rows of its group.
        slots_per_row = 1 if table.storage is None else 8
        num_rows[name] = slots_per_row * round_up(table.vocabulary_size, row_tile)
    split_groups = split_by_memory(groups.values(), num_rows, MAX_ROWS)
    if activation_mem_bytes_limit is None:
        return split_groups
    # Bytes of float32 activations of each table, on each shard.
    activation_bytes = dict.fromkeys(tables, 0)
    for feature in features_of(features):
        samples = (feature.num_samples or 0) // num_shards
        dim = round_up(feature.table_spec.embedding_dim, SUBLANES)
        activation_bytes[feature.table_spec.name] += dim * 4 * samples
    return split_by_memory(split_groups, activation_bytes, activation_mem_bytes_limit)


def split_by_memory(
    groups: Iterable[Sequence[Name]], num_bytes: Mapping[Name, int], limit: int
) -> list[list[Name]]:
    """Splits groups of tables, so that `num_bytes` of a group add up to at most `limit`.

    Each table goes into the first part of its group that has room for the table. A table with more
    than `limit` bytes gets a separate group.
    """
    result: list[list[Name]] = []
    for group in groups:
        subgroups: list[list[Name]] = []
        subgroup_bytes: list[int] = []
        for name in group:
            for number, used_bytes in enumerate(subgroup_bytes):
                if used_bytes + num_bytes[name] <= limit:
                    subgroups[number].append(name)
                    subgroup_bytes[number] += num_bytes[name]
                    break
            else:
                subgroups.append([name])
                subgroup_bytes.append(num_bytes[name])
        result.extend(subgroups)
    return result


def settings_in_stack(
    stack_name: str, padded_rows: Sequence[int], padded_dim: int, *, num_shards: int, rotation: int
) -> list[TableSettingInStack]:
    """Padded sizes and offsets of the tables of a stack, in the order of `padded_rows`."""
    settings = []
    for number, rows in enumerate(padded_rows):
        first_row = sum(padded_rows[:number]) // num_shards
        table_rotation = (number * rotation) % num_shards
        settings.append(
            TableSettingInStack(stack_name, rows, padded_dim, first_row, table_rotation)
        )
    return settings


def plan_stack(
    features: object,
    table_names: Sequence[str],
    *,
    stack_name: str,
    num_shards: int,
    pad: bool = True,
    rotation: int = 0,
    sort_features_by_name: bool = False,
    max_ids_per_partition: LimitsCallable = get_default_limits,
    max_unique_ids_per_partition: LimitsCallable = get_default_limits,
    activation_mem_bytes_limit: int = DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
) -> StackPlan:
    """Plan of one stack with the tables `table_names`, in the order of these names.

    A stack of a single table has the limits of the table. A stack of several tables has the limits
    that the functions `max_ids_per_partition` and `max_unique_ids_per_partition` return, when they
    are called with `(stack_name, total_sample_count)`. The suggested buffer size is the sum over
    the tables, or None if a table has no suggested size.

    Raises: ValueError: a table is repeated or unknown, or the tables cannot share a physical table.
    """
    all_tables = tables_of(features)
    tables = _checked_tables(all_tables, table_names, stack_name, share_combiner=pad)
    first = tables[0]
    tile = SUBLANES if pad else 1
    dim = max(round_up(table.embedding_dim, tile) for table in tables)
    padded_rows = [round_up(table.vocabulary_size, tile * num_shards) for table in tables]
    total_rows = sum(padded_rows)
    if total_rows > MAX_ROWS:
        raise ValueError(
            f"stack {stack_name!r} would have {total_rows} rows, above {MAX_ROWS}; give tables "
            f"{list(table_names)} separate stacks."
        )
    settings = settings_in_stack(
        stack_name, padded_rows, dim, num_shards=num_shards, rotation=rotation
    )
    placements = []
    for table, setting in zip(tables, settings, strict=True):
        placements.append(TablePlacement.of(table, setting))
    readers = _checked_readers(features, table_names, pad=pad)
    if sort_features_by_name:
        readers.sort(key=lambda feature: feature.name)
    feature_placements, total_samples = _place_features(readers, placements, num_shards)
    where = f"stack {stack_name!r}:"
    check_type(max_ids_per_partition, Callable, f"{where} stack_to_max_ids_per_partition")
    check_type(
        max_unique_ids_per_partition, Callable, f"{where} stack_to_max_unique_ids_per_partition"
    )
    max_ids = max_ids_per_partition(stack_name, total_samples)
    max_unique_ids = max_unique_ids_per_partition(stack_name, total_samples)
    for limit in (max_ids, max_unique_ids):
        check_type(limit, PositiveInt, f"{where} the limit of ids in a partition, of a callable,")
    if len(tables) == 1:
        max_ids = first.max_ids_per_partition
        max_unique_ids = first.max_unique_ids_per_partition
    spec = StackedTableSpec(
        stack_name=stack_name,
        stack_vocab_size=total_rows,
        stack_embedding_dim=dim,
        optimizer=first.optimizer,
        combiner=first.combiner,
        total_sample_count=total_samples,
        max_ids_per_partition=int(max_ids),
        max_unique_ids_per_partition=int(max_unique_ids),
        suggested_coo_buffer_size_per_device=_total_buffer_size(tables),
        quantization_config=first.quantization_config,
        activation_mem_bytes_limit=activation_mem_bytes_limit,
        num_shards=num_shards,
    )
    return StackPlan(
        spec=spec,
        dtype=first.dtype,
        tables=tuple(placements),
        features=feature_placements,
        num_stored_values=_num_stored_values(tables),
    )


def _checked_readers(
    features: object, table_names: Sequence[str], *, pad: bool
) -> list[FeatureSpec]:
    """The features that read the tables `table_names`.

    Raises: ValueError: the stack does not support the combiner or the output shape of a feature.
    """
    readers = []
    for feature in features_of(features):
        if feature.table_spec.name in table_names:
            readers.append(feature)
    if pad:
        for feature in readers:
            feature.check_pooled_as_table()
        return readers
    wide = []
    for feature in readers:
        if feature.output_dim > feature.table_spec.embedding_dim:
            wide.append(feature.name)
    if wide:
        raise ValueError(
            f"features {wide}: output_shape has more columns than the table, which no layout here pads."
        )
    return readers


def _total_buffer_size(tables: Sequence[TableSpec]) -> int | None:
    """Sum of the suggested buffer sizes, or None if a table has no suggested size."""
    total = 0
    for table in tables:
        if table.suggested_coo_buffer_size_per_device is None:
            return None
        total += table.suggested_coo_buffer_size_per_device
    return total


def _num_stored_values(tables: Sequence[TableSpec]) -> tuple[int, int] | None:
    """Number of values in the tables and in their slots, or None if no table has a `storage`."""
    num_tables = 0
    most_table_values = 0
    most_slot_values = 0
    for table in tables:
        if table.storage is None:
            continue
        table_values, slot_values = table.storage.num_values(table)
        num_tables += 1
        most_table_values = max(most_table_values, table_values)
        most_slot_values = max(most_slot_values, slot_values)
    if not num_tables:
        return None
    # In arrays that several tables share, every table is padded to the size of the largest table.
    return num_tables * most_table_values, num_tables * most_slot_values


def _checked_tables(
    all_tables: Mapping[str, TableSpec],
    table_names: Sequence[str],
    stack_name: str,
    *,
    share_combiner: bool,
) -> list[TableSpec]:
    """Checks `table_names`, and returns the tables with these names.

    Raises: ValueError: a name is repeated or unknown, or the tables differ in a shared setting.
    """
    repeated = [name for name in table_names if list(table_names).count(name) > 1]
    if repeated:
        raise ValueError(
            f"stack {stack_name!r}: Table {repeated[0]} is repeated in group {list(table_names)}."
        )
    unknown = [name for name in table_names if name not in all_tables]
    if unknown or not table_names:
        raise ValueError(
            f"stack {stack_name!r}: no feature reads tables {unknown}; known are {list(all_tables)}."
        )
    tables = [all_tables[name] for name in table_names]
    shared_fields = ["optimizer", "quantization_config", "dtype", "stochastic_rounding"]
    if share_combiner:
        shared_fields.append("combiner")
    for field in shared_fields:
        values = {table.name: getattr(table, field) for table in tables}
        if any(value != values[tables[0].name] for value in values.values()):
            shown = {name: str(value) for name, value in values.items()}
            raise ValueError(
                f"stack {stack_name!r}: tables have different {field.replace('_', ' ')}s: {shown}."
            )
    return tables


def _place_features(
    readers: Sequence[FeatureSpec], tables: Sequence[TablePlacement], num_shards: int
) -> tuple[tuple[FeaturePlacement, ...], int]:
    """Placements of features in the stacked batch, and the number of samples in this batch."""
    place_of_table = {table.name: place_of(table.setting, num_shards) for table in tables}
    placements = []
    row_offset = 0
    for feature in readers:
        place = place_of_table[feature.table_spec.name]
        transformation = FeatureIdTransformation(row_offset, place.first, place.rotation)
        placements.append(FeaturePlacement.of(feature, transformation))
        row_offset += feature.num_samples or 0
    return tuple(placements), row_offset
