from pprint import pformat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.specs import features_of, tables_of


def table(name="t", **changes):
    return rs.TableSpec(**{"name": name, "vocabulary_size": 9, "embedding_dim": 4, **changes})


def test_specs_print_field_by_field_in_the_published_order():
    spec = table(initializer=jax.nn.initializers.zeros, optimizer=rs.AdamOptimizerSpec(0.1), max_ids_per_partition=64)
    lines = [line.strip().split("=")[0] for line in pformat(spec).splitlines()]
    assert lines == [
        "TableSpec(name", "vocabulary_size", "embedding_dim", "initializer", "optimizer", "combiner",
        "max_ids_per_partition", "max_unique_ids_per_partition", "suggested_coo_buffer_size_per_device",
        "quantization_config", "_stacked_table_spec", "_setting_in_stack", "padded_vocab_size", "padded_embedding_dim",
        "row_offset_in_shard", "shard_rotation",
    ]  # fmt: skip
    assert "optimizer=AdamOptimizerSpec()," in pformat(spec)
    assert "optimizer=SGDOptimizerSpec(learning_rate=0.001)," in pformat(table())  # nobody chose it, so it is told
    feature = rs.FeatureSpec(name="f", table_spec=spec, input_shape=(8, 1), output_shape=(8, 4))
    tail = " ".join(pformat(feature).split())[-90:]
    assert tail.endswith("_id_transformation=FeatureIdTransformation(row_offset=0, col_offset=0, col_shift=0))")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, TypeError, "name must be a non-empty string"),
        ({"vocabulary_size": 0}, ValueError, "table 't': vocabulary_size must be at least 1, got 0"),
        ({"vocabulary_size": True}, TypeError, "vocabulary_size must be an integer"),
        ({"vocabulary_size": 2**31}, ValueError, "exceeds 2147483647"),
        ({"embedding_dim": -3}, ValueError, "embedding_dim must be at least 1"),
        ({"combiner": "max"}, ValueError, "unknown combiner 'max'; choose one of sum, mean, sqrtn, none"),
        ({"dtype": "int32"}, ValueError, "dtype 'int32' is not one of float32, bfloat16, float16"),
        ({"max_ids_per_partition": 0}, ValueError, "max_ids_per_partition must be at least 1"),
        ({"suggested_coo_buffer_size_per_device": 0}, ValueError, "suggested_coo_buffer_size_per_device"),
    ],
)
def test_bad_tables_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        table(**changes)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_dtype_is_given_by_name_or_type(dtype):
    assert table(dtype=dtype).dtype == "bfloat16"


def test_wrong_kinds_get_the_way_out():
    with pytest.raises(TypeError, match=r"wrap an optax transformation with rsembed\.from_optax"):
        table(optimizer="adam")
    with pytest.raises(TypeError, match="initializer must be a function"):
        table(initializer=0.1)
    with pytest.raises(TypeError, match="feature 'f': table_spec must be a TableSpec"):
        rs.FeatureSpec(name="f", table_spec="t")
    with pytest.raises(ValueError, match="asks for 5 columns, but table 't' has embedding_dim=4"):
        rs.FeatureSpec(name="f", table_spec=table(), output_shape=(8, 5))


@pytest.mark.parametrize(
    "bounds", [(1.0, 1.0, 4), (0.0, 1.0, 1), (-np.inf, np.inf, 4), (0.0, np.inf, 4), (np.nan, 1.0, 4)]
)
def test_bad_quantization_is_refused(bounds):
    with pytest.raises(ValueError, match="QuantizationConfig"):
        rs.QuantizationConfig(*bounds)


def test_features_come_in_leaf_order_and_tables_in_first_seen_order():
    one, two = table("one"), table("two")
    features = {"z": rs.FeatureSpec(name="z", table_spec=one), "a": [rs.FeatureSpec(name="a", table_spec=two)]}
    assert [f.name for f in features_of(features)] == ["a", "z"]
    assert list(tables_of(features)) == ["two", "one"]


def test_features_are_checked_together():
    feature = rs.FeatureSpec(name="f", table_spec=table())
    with pytest.raises(ValueError, match=r"unique, but \['f'\]"):
        features_of([feature, feature])
    with pytest.raises(ValueError, match="two different tables are named 't'"):
        features_of([feature, rs.FeatureSpec(name="g", table_spec=table(embedding_dim=5))])
    with pytest.raises(TypeError, match="got str"):
        features_of(["f"])
    with pytest.raises(ValueError, match="no FeatureSpec"):
        features_of([])
