from pprint import pformat

import jax

import rsembed as rs
from rsembed.specs import features_of, tables_of


def table(name="t", **changes):
    return rs.TableSpec(**{"name": name, "vocabulary_size": 9, "embedding_dim": 4, **changes})


def test_specs_print_field_by_field_in_the_published_order():
    spec = table(
        initializer=jax.nn.initializers.zeros,
        optimizer=rs.optimizers.Adam(0.1),
        max_ids_per_partition=64,
    )
    lines = [line.strip().split("=")[0] for line in pformat(spec).splitlines()]
    assert lines == [
        "TableSpec(name", "vocabulary_size", "embedding_dim", "initializer", "optimizer", "combiner",
        "max_ids_per_partition", "max_unique_ids_per_partition", "suggested_coo_buffer_size_per_device",
        "quantization_config", "_stacked_table_spec", "_setting_in_stack", "padded_vocab_size", "padded_embedding_dim",
        "row_offset_in_shard", "shard_rotation",
    ]  # fmt: skip
    assert "optimizer=Adam()," in pformat(spec)
    feature = rs.FeatureSpec("f", spec, input_shape=(8, 1), output_shape=(8, 4))
    tail = " ".join(pformat(feature).split())[-90:]
    assert tail.endswith(
        "_id_transformation=FeatureIdTransformation(row_offset=0, col_offset=0, col_shift=0))"
    )


def test_features_come_in_leaf_order_and_tables_in_first_seen_order():
    one, two = table("one"), table("two")
    features = {
        "z": rs.FeatureSpec("z", one),
        "a": [rs.FeatureSpec("a", two)],
    }
    assert [f.name for f in features_of(features)] == ["a", "z"]
    assert list(tables_of(features)) == ["two", "one"]
