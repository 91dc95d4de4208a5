"""Layouts and optimizers can be saved as JSON records and restored."""

import json

import pytest

from rsembed.sparsecore import embedding, embedding_spec
from tests.sparsecore import small_world


def test_records_are_plain_json_and_come_back_equal():
    specs = small_world.placed_specs(
        2, 2, rotation=3, quantization_config=embedding_spec.QuantizationConfig(-1, 1, 8)
    )
    record = embedding.create_proto_from_feature_specs(specs, 2, 2)
    assert embedding_spec.EmbeddingSpecRecord.from_json(record.to_json()) == record
    (stack,) = json.loads(record.to_json())["stacked_table_specs"]
    assert stack["stack_name"] == "first_second"
    assert (stack["num_sparsecores"], stack["stack_vocab_size"]) == (4, 96)
    first, second = stack["table_specs"]
    assert (first["table_name"], first["shard_rotation"]) == ("first", 0)
    assert (second["table_name"], second["shard_rotation"]) == ("second", 3)
    assert [feature["feature_name"] for feature in first["feature_specs"]] == ["a", "c"]
    assert second["quantization"] == [-1, 1, 8]


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
    text = json.dumps(vars(embedding_spec.optimizer_spec_to_proto(optimizer)))
    record = embedding_spec.OptimizerRecord(**json.loads(text))
    assert embedding.proto_to_optimizer_spec(record) == optimizer


def schedule(step):
    return 0.1 * step


def test_a_schedule_and_the_record_of_its_optimizer_give_the_optimizer_back():
    optimizer = embedding_spec.AdagradOptimizerSpec(schedule, 0.25)
    record = embedding.optimizer_spec_to_proto(optimizer)
    assert record.learning_rate_tag == "schedule"
    assert embedding.get_optimizer_class(record.type)(schedule, **record.float_params) == optimizer
