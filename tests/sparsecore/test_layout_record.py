"""Layouts and optimizers survive being written down."""

import json

import numpy as np
import pytest

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore import small_world


def recorded(**fields):
    specs = small_world.placed_specs(2, 2, rotation=3, **fields)
    return specs, embedding.create_proto_from_feature_specs(specs, 2, 2)


def test_records_are_plain_json_and_come_back_equal():
    _, record = recorded(quantization_config=embedding_spec.QuantizationConfig(-1, 1, 8))
    assert embedding_spec.EmbeddingSpecRecord.from_json(record.to_json()) == record
    (stack,) = json.loads(record.to_json())["stacked_table_specs"]
    assert (stack["stack_name"], stack["num_sparsecores"], stack["stack_vocab_size"]) == (
        "first_second",
        4,
        96,
    )
    assert [table["table_name"] for table in stack["table_specs"]] == ["first", "second"]
    assert [table["shard_rotation"] for table in stack["table_specs"]] == [0, 3]
    assert [feature["feature_name"] for feature in stack["table_specs"][0]["feature_specs"]] == [
        "a",
        "c",
    ]
    assert stack["table_specs"][1]["quantization"] == [-1, 1, 8]


def test_row_ids_agree_with_the_stacked_arrays():
    specs, record = recorded()
    tables = {
        "first": np.arange(20.0)[:, None] * np.ones(5),
        "second": 100 + np.arange(50.0)[:, None] * np.ones(5),
    }
    (stacked,) = table_stacking.stack_and_shard_tables(
        embedding.get_table_specs(specs), tables, 4
    ).values()
    flat = stacked.reshape(-1, 8)[:, 0]
    rows = table_stacking.get_row_ids_in_stacked_tables(record, {"first": [3, 19], "second": [49]})
    assert {name: flat[ids].tolist() for name, ids in rows.items()} == {
        "first_second": [3.0, 19.0, 149.0]
    }
    setting = specs["b"].table_spec.setting_in_stack
    one = table_stacking.compute_physical_row_ids(
        4, 96, setting.shard_rotation, setting.row_offset_in_shard, 49
    )
    assert one == rows["first_second"][-1]


@pytest.mark.parametrize(
    "optimizer",
    [
        embedding_spec.LaPropOptimizerSpec(0.5, b1=0.25),
        embedding_spec.RowWiseAdagradOptimizerSpec(0.5),
        embedding_spec.FTRLOptimizerSpec(0.5, multiply_linear_by_learning_rate=True),
    ],
    ids=lambda optimizer: optimizer.short_name(),
)
def test_optimizers_come_back_equal(optimizer):
    record = embedding_spec.optimizer_spec_to_proto(optimizer)
    back = embedding.proto_to_optimizer_spec(
        embedding_spec.OptimizerRecord(**json.loads(json.dumps(vars(record))))
    )
    assert type(back) is type(optimizer)
    assert back == optimizer


def schedule(step):
    return 0.1 * step


def test_functions_leave_their_name():
    optimizer = embedding_spec.AdagradOptimizerSpec(schedule, 0.25)
    record = embedding.optimizer_spec_to_proto(optimizer)
    with pytest.raises(
        ValueError, match=r"optimizer 'adagrad' has a function as its learning rate, 'schedule'"
    ):
        embedding.proto_to_optimizer_spec(record)
    assert embedding.get_optimizer_class(record.type)(schedule, **record.float_params) == optimizer
    custom = embedding_spec.CustomOptimizerSpec(0.1, lambda g, w, lr: w, short_name_str="mine")
    record = embedding.optimizer_spec_to_proto(custom)
    assert record.type == embedding_spec.CUSTOM_CODE
    with pytest.raises(ValueError, match="optimizer 'mine' has a function as its rule"):
        embedding.proto_to_optimizer_spec(record)
