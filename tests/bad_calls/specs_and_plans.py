"""Bad fields of specs, collections and plans."""

import numpy as np

import rsembed as rs
from tests.bad_calls.world import feature, mesh, table

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)
NAN = float("nan")


def one(**o):
    return rs.EmbeddingCollection([feature()], **o)


def plan(**o):
    return rs.plan_stacking([feature("a", table("s")), feature("b", table("t"))], **o)


def stored(storage, rows=9, **fields):
    return rs.EmbeddingCollection([feature(table_spec=table(storage=storage, vocabulary_size=rows, **fields))])


BAD = {
    "negative rows": (
        lambda: table(vocabulary_size=-9), ValueError, "table 'word': vocabulary_size must be in [1, inf), got -9.",
    ),
    "rows float": (
        lambda: table(vocabulary_size=9.0),
        TypeError, "table 'word': vocabulary_size must be an integer, got 9.0", "got 9.0 (float)",
    ),
    "rows array": (
        lambda: table(vocabulary_size=np.array([9])),
        TypeError, "table 'word': vocabulary_size must be an integer, got an",
    ),
    "dim text": (
        lambda: table(embedding_dim="4"),
        TypeError, "table 'word': embedding_dim must be an integer, got '4'", "got '4' (str)",
    ),
    "name None": (lambda: table(None), TypeError, "TableSpec: name must be a non-empty string, got None."),
    "combiner list": (
        lambda: table(combiner=["sum"]), ValueError, "table 'word': unknown combiner ['sum']; choose one of sum,",
    ),
    "dtype None": (lambda: table(dtype=None), ValueError, "table 'word': dtype None is not one of float32, bfloat16,"),
    "dtype list": (
        lambda: table(dtype=["float32"]), ValueError, "table 'word': dtype ['float32'] is not one of float32,",
    ),
    "optimizer class": (
        lambda: table(optimizer=rs.SGDOptimizerSpec), TypeError, "table 'word': optimizer must be made first, as in",
    ),
    "storage dict": (
        lambda: table(storage={}),
        TypeError, "table 'word': storage, such as rsembed.Hashed(...), must be", "got {} (dict)",
    ),
    "limit None": (
        lambda: table(max_ids_per_partition=None),
        TypeError, "table 'word': max_ids_per_partition must be an integer, got", "got None (NoneType)",
    ),
    "coo buffer -1": (
        lambda: table(suggested_coo_buffer_size_per_device=-1),
        ValueError, "table 'word': suggested_coo_buffer_size_per_device must be", "got -1",
    ),
    "initializer text": (
        lambda: table(initializer="zeros"),
        TypeError, "table 'word': initializer must be a function of (key,", "got 'zeros'",
    ),
    "quantization NaN": (
        lambda: rs.QuantizationConfig(NAN, 1.0, 4),
        ValueError, "QuantizationConfig: min_value nan must be below max_value",
    ),
    "quantization text": (
        lambda: rs.QuantizationConfig("0", 1.0, 4),
        TypeError, "QuantizationConfig: min_value must be a number, got '0'", "got '0' (str)",
    ),
    "feature name None": (lambda: feature(None), TypeError, "FeatureSpec: name must be a non-empty string, got None."),
    "feature table None": (
        lambda: rs.FeatureSpec(name="a", table_spec=None),
        TypeError, "feature 'a': table_spec must be of type TableSpec, got None", "got None (NoneType)",
    ),
    "input shape negative": (
        lambda: feature(input_shape=(-1, 2)), ValueError, "feature 'title': input_shape must be in [1, inf), got -1.",
    ),
    "input shape nested": (
        lambda: feature(input_shape=((8, 2),)),
        TypeError, "feature 'title': input_shape must be an integer, got (8, 2)", "got (8, 2) (tuple)",
    ),
    "input shape array": (
        lambda: feature(input_shape=np.array([8., 2.])),
        TypeError, "feature 'title': input_shape must be an integer, got an",
    ),
    "output dim zero": (
        lambda: feature(output_shape=(8, 0)), ValueError, "feature 'title': output_shape must be in [1, inf), got 0.",
    ),
    "None as features": (lambda: rs.EmbeddingCollection(None), ValueError, "features: there is no FeatureSpec in it."),
    "set of features": (
        lambda: rs.EmbeddingCollection({feature()}),
        TypeError, "features must be FeatureSpecs (nested in lists or dicts),", "got set",
    ),
    "mesh tuple": (
        lambda: one(mesh=(2,)),
        TypeError, "EmbeddingCollection: mesh must be a mesh (jax.make_mesh", "got (2,) (tuple)",
    ),
    "mesh text": (
        lambda: one(mesh="auto"),
        TypeError, "EmbeddingCollection: mesh must be a mesh (jax.make_mesh", "got 'auto' (str)",
    ),
    "axis empty": (
        lambda: one(mesh=mesh(), sharding_axis=()),
        ValueError, "sharding_axis=() must name axes of the mesh once each,",
    ),
    "placement number": (
        lambda: one(mesh=mesh(), placement=1),
        TypeError, "EmbeddingCollection: placement must be a text or a mapping", "got 1 (int)",
    ),
    "capacity True": (
        lambda: one(mesh=mesh(), exchange_capacity=True),
        TypeError, "EmbeddingCollection: exchange_capacity must be an integer", "got True (bool)",
    ),
    "bounds None": (
        lambda: one(bounds_check=None),
        TypeError, "EmbeddingCollection: bounds_check must be a text, got None", "got None (NoneType)",
    ),
    "plan no features": (lambda: rs.plan_stacking([]), ValueError, "features: there is no FeatureSpec in it."),
    "plan half shards": (
        lambda: plan(num_shards=2.5),
        TypeError, "plan_stacking: num_shards must be an integer, got 2.5", "got 2.5 (float)",
    ),
    "plan groups flat": (
        lambda: plan(groups=["s", "t"]),
        TypeError, "plan_stacking: groups[0] must be a list (each a text), got", "got 's' (str)",
    ),
    "plan groups of specs": (
        lambda: plan(groups=[[table("s"), table("t")]]),
        TypeError, "plan_stacking: groups[0][0] must be a text, got a value of", "got a value of type TableSpec",
    ),
    "plan mem float": (
        lambda: plan(activation_mem_bytes_limit=1.5),
        TypeError, "plan_stacking: activation_mem_bytes_limit must be an", "got 1.5 (float)",
    ),
    "plan.stack number": (lambda: plan().stack(0), KeyError, "no stack 0; the plan has ['s_t']."),
    "plan load negative": (
        lambda: plan().shard_load({"a": [-3]}),
        ValueError, "shard_load: feature 'a': ids must be integers from 0 to 8,", "got [-3]",
    ),
}  # fmt: skip
