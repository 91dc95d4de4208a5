"""Specs and optimizers, named as in jax-tpu-embedding, and a JSON description of specs.

```
EmbeddingSpecRecord ─▶ StackRecord ─▶ TableRecord (with its optimizer) ─▶ FeatureRecord
```
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int, PyTree

from rsembed import optimizers
from rsembed.checks import check_type, validated
from rsembed.optimizers.base import (
    Hyperparameters,
    LearningRate as LearningRate,
    OptimizerSpec as OptimizerSpec,
)
from rsembed.optimizers.rules import (
    AdagradMomentumSlotVariables as AdagradMomentumSlotVariables,
    AdagradSlotVariables as AdagradSlotVariables,
    AdamSlotVariables as AdamSlotVariables,
    F2ASlotVariables as F2ASlotVariables,
    FTRLSlotVariables as FTRLSlotVariables,
    LaPropSlotVariables as LaPropSlotVariables,
    SGDSlotVariables as SGDSlotVariables,
)
from rsembed.places import Place
from rsembed.sparsecore.layout import Nested, StackLayout, stack_layouts
from rsembed.specs import (
    DEFAULT_ACTIVATION_MEM_BYTES_LIMIT as DEFAULT_ACTIVATION_MEM_BYTES_LIMIT,
    CallableTableInitializer as CallableTableInitializer,
    FeatureIdTransformation as FeatureIdTransformation,
    FeatureSpec as FeatureSpec,
    QuantizationConfig as QuantizationConfig,
    StackedTableSpec as StackedTableSpec,
    TableSettingInStack as TableSettingInStack,
    TableSpec as TableSpec,
)

AdagradMomentumOptimizerSpec = optimizers.rules.AdagradMomentum
AdagradOptimizerSpec = optimizers.Adagrad
AdamOptimizerSpec = optimizers.Adam
CustomOptimizerSpec = optimizers.Custom
F2AOptimizerSpec = optimizers.rules.F2A
FTRLOptimizerSpec = optimizers.FTRL
LaPropOptimizerSpec = optimizers.LaProp
RowWiseAdagradOptimizerSpec = optimizers.RowWiseAdagrad
SGDOptimizerSpec = optimizers.SGD
HyperParameterType = Hyperparameters
NumericParameter = float
Record = TypeVar("Record")
Ids = TypeVar("Ids", int, np.ndarray, jax.Array)


_CODES: dict[type[OptimizerSpec], int] = {
    SGDOptimizerSpec: 1,
    AdagradOptimizerSpec: 2,
    AdamOptimizerSpec: 3,
    FTRLOptimizerSpec: 4,
    F2AOptimizerSpec: 5,
    AdagradMomentumOptimizerSpec: 6,
    # jax-tpu-embedding defines the optimizer codes 1 to 7, where code 7 means a custom optimizer.
    # Optimizer codes above 7 exist only in rsembed.
    LaPropOptimizerSpec: 8,
    RowWiseAdagradOptimizerSpec: 9,
}
CUSTOM_CODE = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """Description of an optimizer.

    `type` is the numeric code of the optimizer's class, see `get_optimizer_type`. If the learning
    rate is a function, `learning_rate` is None and `learning_rate_tag` is the name of the function.
    """

    type: int
    short_name: str
    learning_rate: float | None
    learning_rate_tag: str | None
    float_params: dict[str, float]
    bool_params: dict[str, bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureRecord:
    """A feature and its offsets in the stacked batch."""

    feature_name: str
    input_shape: tuple[int | None, ...] | None
    output_shape: tuple[int, ...] | None
    row_offset: int
    col_offset: int
    col_shift: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A table, its offsets in the stack, and the features that read it."""

    table_name: str
    vocab_size: int
    embedding_dim: int
    padded_vocab_size: int
    padded_embedding_dim: int
    row_offset_in_shard: int
    shard_rotation: int
    combiner: str
    dtype: str
    stochastic_rounding: bool
    optimizer: OptimizerRecord
    quantization: tuple[float, float, int] | None
    feature_specs: tuple[FeatureRecord, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRecord:
    """A stack of tables. `num_sparsecores` is the number of shards, summed over all devices."""

    stack_name: str
    stack_vocab_size: int
    stack_embedding_dim: int
    total_sample_count: int
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    suggested_coo_buffer_size_per_device: int | None
    num_sparsecores: int
    activation_mem_bytes_limit: int
    table_specs: tuple[TableRecord, ...]

    def all_rows(self, table: TableRecord) -> slice | Int[np.ndarray, " vocab"]:
        """Index of all rows of a table in the flat stacked array, in the order of the ids."""
        num_shards = self.num_sparsecores
        place = Place(0, table.row_offset_in_shard * num_shards, table.shard_rotation)
        return place.all_rows(
            table.vocab_size,
            spread=num_shards,
            rows_per_shard=self.stack_vocab_size // num_shards,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSpecRecord:
    """Description of all stacks of a model, which can be stored as JSON.

    Example:
      >>> from rsembed.sparsecore import embedding, embedding_spec
      >>> table = embedding_spec.TableSpec(name="words", vocabulary_size=30, embedding_dim=4)
      >>> feature = embedding_spec.FeatureSpec(name="word", table_spec=table, output_shape=(8, 4))
      >>> embedding.prepare_feature_specs_for_training(feature, 1, 2)
      >>> record = create_proto_from_feature_specs(feature, 1, 2)
      >>> record == EmbeddingSpecRecord.from_json(record.to_json())
      True
    """

    stacked_table_specs: tuple[StackRecord, ...]

    def to_json(self, *, indent: int | None = 2) -> str:
        """The description as a JSON string."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> EmbeddingSpecRecord:
        """Reads a description from the JSON string that `to_json` returned.

        Raises: ValueError: the string does not describe an `EmbeddingSpecRecord`.
        """
        try:
            return _restored(cls, json.loads(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the text is no EmbeddingSpecRecord in JSON: {error}.") from error


_NESTED = {
    "stacked_table_specs": StackRecord,
    "table_specs": TableRecord,
    "feature_specs": FeatureRecord,
}


def _restored(record: Callable[..., Record], fields: Mapping[str, PyTree]) -> Record:
    """Converts the parsed JSON `fields` to the dataclass `record`, and lists to tuples."""
    values: dict[str, PyTree] = {}
    for name, value in fields.items():
        if name in _NESTED:
            value = tuple(_restored(_NESTED[name], one) for one in value)
        elif name == "optimizer":
            value = OptimizerRecord(**value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return record(**values)


@validated
def create_proto_from_feature_specs(
    feature_specs: Nested[FeatureSpec],
    global_device_count: int,
    num_sparsecore_per_device: int | None = None,
) -> EmbeddingSpecRecord:
    """Description of stacks, tables and features, which can be stored as JSON.

    Args:
      feature_specs: specs of all features, with their tables already assigned to stacks.
      global_device_count: number of devices for which the tables were stacked.
      num_sparsecore_per_device: SparseCores per device, by default the number for which the tables
        were stacked.

    Raises: ValueError: a table is not assigned to a stack, or was stacked for a different number of
      shards.
    """
    layouts = stack_layouts(
        feature_specs, num_devices=global_device_count, num_cores=num_sparsecore_per_device
    )
    return EmbeddingSpecRecord(stacked_table_specs=tuple(map(stack_record, layouts.values())))


def stack_record(layout: StackLayout) -> StackRecord:
    """Description of one stack, with its tables and the features of the layout."""
    return StackRecord(
        **_shared_fields(StackRecord, layout.spec),
        num_sparsecores=layout.num_shards,
        table_specs=tuple(_table_record(table, layout.features) for table in layout.tables),
    )


def _shared_fields(record: type, source: Any) -> dict[str, Any]:
    """Values of all fields of `source` that the dataclass `record` also has, by field name."""
    names_of_record = {field.name for field in dataclasses.fields(record)}
    shared = {}
    for field in dataclasses.fields(source):
        if field.name in names_of_record:
            shared[field.name] = getattr(source, field.name)
    return shared


def _table_record(table: TableSpec, features: Sequence[FeatureSpec]) -> TableRecord:
    config = table.quantization_config
    feature_records = []
    for feature in features:
        if feature.table_spec.name != table.name:
            continue
        record = FeatureRecord(
            feature_name=feature.name,
            **_shared_fields(FeatureRecord, feature),
            **_shared_fields(FeatureRecord, feature.id_transformation),
        )
        feature_records.append(record)
    optimizer = {"optimizer": optimizer_spec_to_proto(table.optimizer)}
    return TableRecord(
        **_shared_fields(TableRecord, table.setting_in_stack),
        **_shared_fields(TableRecord, table) | optimizer,
        table_name=table.name,
        vocab_size=table.vocabulary_size,
        quantization=None if config is None else config.as_tuple(),
        feature_specs=tuple(feature_records),
    )


def get_optimizer_type(optimizer_class: type[OptimizerSpec]) -> int:
    """Numeric code of an optimizer class, or `CUSTOM_CODE` for a class without a code."""
    check_type(optimizer_class, type[OptimizerSpec], "get_optimizer_type: optimizer_class")
    return _CODES.get(optimizer_class, CUSTOM_CODE)


def get_optimizer_class(optimizer_type: int) -> type[OptimizerSpec]:
    """The optimizer class with the numeric code `optimizer_type`.

    `get_optimizer_class` is the inverse of `get_optimizer_type`.

    Raises: ValueError: no optimizer class has the code, or the code means a custom optimizer.
    """
    for optimizer_class, code in _CODES.items():
        if code == optimizer_type:
            return optimizer_class
    raise ValueError(
        f"optimizer code {optimizer_type} names no class; known are {sorted(_CODES.values())}."
    )


@validated
def optimizer_spec_to_proto(opt: OptimizerSpec) -> OptimizerRecord:
    """Description of an optimizer.

    An `OptimizerRecord` cannot contain functions. For an optimizer class without a code, the record
    contains only the type, the short name and the learning rate. If the learning rate is a
    function, the record contains only the name of the function.
    """
    learning_rate = opt.learning_rate
    tag = None
    if callable(learning_rate):
        tag = str(getattr(learning_rate, "__qualname__", type(learning_rate).__name__))
    float_params = {}
    bool_params = {}
    if type(opt) in _CODES:
        for field in dataclasses.fields(opt):
            value = getattr(opt, field.name)
            if field.name == "learning_rate" or value is None:
                continue
            if isinstance(value, bool):
                bool_params[field.name] = value
            else:
                float_params[field.name] = float(value)
    return OptimizerRecord(
        type=get_optimizer_type(type(opt)),
        short_name=opt.short_name(),
        learning_rate=None if callable(learning_rate) else float(learning_rate),
        learning_rate_tag=tag,
        float_params=float_params,
        bool_params=bool_params,
    )


@validated
def proto_to_optimizer_spec(proto: OptimizerRecord) -> OptimizerSpec:
    """The optimizer that a result of `optimizer_spec_to_proto` describes.

    Raises: ValueError: the optimizer that `proto` describes has a class without a code, or has a
      function as its learning rate.
    """
    if proto.type == CUSTOM_CODE or proto.learning_rate is None:
        what = (
            "rule" if proto.type == CUSTOM_CODE else f"learning rate, {proto.learning_rate_tag!r}"
        )
        raise ValueError(
            f"optimizer {proto.short_name!r} has a function as its {what}, which a record cannot "
            "hold; make it anew, as in get_optimizer_class(proto.type)(schedule, "
            "**proto.float_params)."
        )
    parameters: dict[str, float] = {**proto.float_params, **proto.bool_params}
    return get_optimizer_class(proto.type)(proto.learning_rate, **parameters)


@validated
def compute_physical_row_ids(
    num_sparse_cores: int,
    stack_vocab_size: int,
    shard_rotation: int,
    row_offset_in_shard: int,
    row_ids: Ids,
) -> Ids:
    """Row index of each id in the flat stacked array: `shard * rows per shard + local row`."""
    place = Place(0, row_offset_in_shard * num_sparse_cores, shard_rotation)
    return place.rows(
        row_ids, spread=num_sparse_cores, rows_per_shard=stack_vocab_size // num_sparse_cores
    )


@validated
def get_row_ids_in_stacked_table(
    stack_table_spec: StackRecord, table_spec: TableRecord, row_ids: Sequence[int]
) -> list[int]:
    """Converts ids of a table to row indices in the flat stacked array.

    Raises: ValueError: an id is outside the table, or the table belongs to a different stack.
    """
    if table_spec not in stack_table_spec.table_specs:
        names = [table.table_name for table in stack_table_spec.table_specs]
        raise ValueError(
            f"table {table_spec.table_name!r}, as it is recorded, is none of stack "
            f"{stack_table_spec.stack_name!r}, which has {names}; take both out of one record."
        )
    ids = np.asarray(row_ids, np.int64)
    outside = ids[(ids < 0) | (ids >= table_spec.vocab_size)]
    if outside.size:
        raise ValueError(
            f"table {table_spec.table_name!r}: id {outside[0]} is outside its vocabulary of {table_spec.vocab_size}."
        )
    rows = compute_physical_row_ids(
        stack_table_spec.num_sparsecores,
        stack_table_spec.stack_vocab_size,
        table_spec.shard_rotation,
        table_spec.row_offset_in_shard,
        ids,
    )
    return rows.tolist()


@validated
def get_row_ids_in_stacked_tables(
    embedding_spec_proto: EmbeddingSpecRecord, row_ids: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Converts ids of tables to row indices in the flat stacked array of each stack.

    Args:
      embedding_spec_proto: description of the stacks.
      row_ids: ids to convert, by table name.

    Returns:
      For each stack, a list with the row indices of the ids. The tables of the stack follow each
      other in the order of `table_specs`.

    Raises: ValueError: `embedding_spec_proto` does not describe a table in `row_ids`, or an id is
      outside its table.
    """
    recorded = {}
    for stack in embedding_spec_proto.stacked_table_specs:
        for table in stack.table_specs:
            recorded[table.table_name] = (stack, table)
    unknown = sorted(set(row_ids) - set(recorded))
    if unknown:
        raise ValueError(f"no tables {unknown} in the record; it has {sorted(recorded)}.")
    rows: dict[str, list[int]] = {}
    for name, (stack, table) in recorded.items():
        if name in row_ids:
            table_rows = get_row_ids_in_stacked_table(stack, table, row_ids[name])
            rows.setdefault(stack.stack_name, []).extend(table_rows)
    return rows
