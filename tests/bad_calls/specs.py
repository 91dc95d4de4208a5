"""Bad tables, features, collections and plans."""

import rsembed as rs
from rsembed.sparsecore import embedding
from tests.bad_calls.world import feature, table

BAD = """
# TableSpec
table(3) => TypeError: TableSpec: name ... non-empty string ... 3
table(vocabulary_size=0) => ValueError: table 'word': vocabulary_size ... [1, inf), got 0
table(vocabulary_size="9") => TypeError: table 'word': vocabulary_size ... integer ... '9'
table(vocabulary_size=2**31) => ValueError: table 'word' ... 2147483648 exceeds ... split the table
table(initializer=0.1) => TypeError: table 'word': initializer ... (key, shape) ... 0.1
table(optimizer="adam") => TypeError: table 'word' ... from_optax ... OptimizerSpec
table(combiner="average") => ValueError: table 'word' ... 'sum' or 'mean' ... 'average'
table(dtype="int8") => ValueError: table 'word' ... 'int8' ... float32, bfloat16, float16
table(quantization_config=(0.0, 1.0, 4)) => TypeError: table 'word': quantization_config ... QuantizationConfig
table(stochastic_rounding="no") => TypeError: table 'word': stochastic_rounding ... True or False ... 'no'
table(storage=rs.Hashed) => TypeError: table 'word': storage ... Hashed(...)
setattr(_placed(), "combiner", "mean") => AttributeError: table 'word' ... 'combiner' ... before stacking
rs.QuantizationConfig(1.0, 0.0, 4) => ValueError: min_value 1.0 ... max_value
rs.QuantizationConfig(0.0, 1.0, 1) => ValueError: QuantizationConfig: num_buckets
rs.QuantizationConfig(1.0, 1.0, 4) => ValueError: QuantizationConfig: min_value
rs.QuantizationConfig(-np.inf, np.inf, 4) => ValueError: QuantizationConfig: min_value
rs.QuantizationConfig(0.0, np.inf, 4)
    => ValueError: QuantizationConfig: min_value 0.0 must be below max_value inf, both finite
rs.QuantizationConfig(0.0, 1.0, 2.5) => TypeError: num_buckets ... integer ... 2.5
# FeatureSpec
feature("") => TypeError: FeatureSpec: name ... non-empty string
feature(table_spec="word") => TypeError: feature 'title': table_spec ... TableSpec ... str
feature(combiner="average") => ValueError: feature 'title': combiner ... 'sum' or 'mean' ... 'average'
rs.plan_stacking(feature(combiner="none"), num_shards=1)
    => ValueError: feature 'title': combiner='none' differs from 'sum' of table 'word' ... EmbeddingCollection
feature(input_shape=8) => TypeError: feature 'title': input_shape ... list ... got 8
feature(input_shape=(8, 0)) => ValueError: feature 'title': input_shape ... got 0
feature(output_shape=(8.0, 4)) => TypeError: feature 'title': output_shape ... 8.0
feature(input_shape=()) => ValueError: feature 'title': input_shape ... ()
feature(output_shape=(8, 5)) => ValueError: feature 'title' ... 5 columns ... table 'word' ... embedding_dim=4
# Features together
rs.EmbeddingCollection([]) => ValueError: no FeatureSpec
rs.EmbeddingCollection(["title"]) => TypeError: FeatureSpec ... str
rs.EmbeddingCollection([feature(), feature()]) => ValueError: unique ... 'title'
rs.EmbeddingCollection([feature(), feature("a", table(vocabulary_size=7, dtype="float16"))])
    => ValueError: 'word' (one is read by feature 'a'); they differ in vocabulary_size, dtype. ... one TableSpec
rs.EmbeddingCollection({"a": feature("a"), 1: feature("b")}) => TypeError: features: keys ... order ... texts
# EmbeddingCollection
one(bounds_check="clip") => ValueError: bounds_check ... 'raise' or 'ignore' ... 'clip'
one(implementation="natvie") => ValueError: 'natvie' ... native, sparsecore, gpu, reference
one(implementation="gpu") => NotImplementedError: gpu' cannot run here: ... the computation is for cpu
one(implementation="sparsecore") => NotImplementedError: sparsecore' cannot run here: ... the computation is for cpu
one(sharding_axis="shard") => ValueError: sharding_axis='shard' needs a mesh
one(mesh=mesh(), sharding_axis="shrad") => ValueError: sharding_axis='shrad' ... ('shard',)
one(mesh=mesh(), sharding_axis=("shard", "shard")) => ValueError: sharding_axis ... once each
one(placement="row") => ValueError: placement='row' needs a mesh
one(mesh=mesh(), placement="rows") => ValueError: table 'word' ... 'rows' ... row, table, column, replicated
one(mesh=mesh(), placement={"wrod": "row"}) => ValueError: placement ... 'wrod' ... 'word'
rs.EmbeddingCollection([feature(table_spec=table(embedding_dim=3))], mesh=mesh(), placement="column")
    => ValueError: 'word' ... 'column': embedding_dim=3 ... 2 devices; place them 'row'
rs.EmbeddingCollection([feature(output_shape=(3, 4))], mesh=mesh())
    => ValueError: feature 'title' ... output_shape (3, 4) ... 2 devices
# plan_stacking
plan(groups=[["s", "x"]]) => ValueError: every table once ... 't' ... 'x'
plan(groups=[["s", "t"], ["t"]]) => ValueError: every table once ... 't'
plan(num_shards=2, pad=False) => ValueError: without padding ... pad=True
rs.plan_stacking([feature(table_spec=table(storage=rs.Hashed()))])
    => NotImplementedError: 'word' ... storage= ... EmbeddingCollection
plan(groups=[["s", "t"]], t={"optimizer": rs.optimizers.Adam()}) => ValueError: different optimizers
plan(groups=[["s", "t"]], t={"dtype": "bfloat16"}) => ValueError: different dtypes
plan(groups=[["s", "t"]], t={"stochastic_rounding": True}) => ValueError: different stochastic roundings
plan(groups=[["s", "t"]], t={"quantization_config": rs.QuantizationConfig(-1, 1, 8)})
    => ValueError: different quantization configs
plan(groups=[["s", "t"]], pad=False, t={"vocabulary_size": 2**31 - 8})
    => ValueError: above 2147483647; give tables ['s', 't'] separate stacks
plan(groups=[["s", "t"]], num_shards=8, t={"vocabulary_size": 2**31 - 64})
    => ValueError: above 2147483647; give tables ['s', 't'] separate stacks
plan().stack("stakc") => KeyError: 'stakc' ... s_t
plan().table("wrod") => KeyError: 'wrod' ... 's', 't'
plan().shard_load({"x": [1]}) => ValueError: 'x' ... 'a', 'b'
plan().shard_load({"a": ["x"]}) => ValueError: feature 'a' ... integers ... 'x'
table(embedding_dim="4") => TypeError: table 'word': embedding_dim must be an integer, got '4' (str)
table(combiner=["sum"]) => TypeError: table 'word': combiner must be 'sum' or 'mean' ... ['sum']
table(dtype=None) => ValueError: table 'word': dtype None is not one of float32, bfloat16,
table(dtype=["float32"]) => ValueError: table 'word': dtype ['float32'] is not one of float32,
table(optimizer=rs.optimizers.SGD) => TypeError: table 'word': optimizer must be made first, as in
table(storage={}) => TypeError: table 'word': storage, such as rsembed.Hashed(...), must be ... got {} (dict)
table(max_ids_per_partition=None)
    => TypeError: table 'word': max_ids_per_partition must be an integer, got None (NoneType)
table(suggested_coo_buffer_size_per_device=-1)
    => ValueError: table 'word': suggested_coo_buffer_size_per_device must be ... got -1
rs.QuantizationConfig(NAN, 1.0, 4) => ValueError: QuantizationConfig: min_value nan must be below max_value
rs.QuantizationConfig("0", 1.0, 4) => TypeError: QuantizationConfig: min_value must be a number, got '0' (str)
feature(input_shape=((8, 2),)) => TypeError: feature 'title': input_shape must be an integer, got (8, 2) (tuple)
feature(output_shape=(8, 0)) => ValueError: feature 'title': output_shape must be in [1, inf), got 0.
one(mesh=mesh(), sharding_axis=()) => ValueError: sharding_axis=() must name axes of the mesh once each,
plan().stack(0) => KeyError: no stack 0; the plan has ['s_t'].
"""


def _placed():
    spec = table()
    embedding.prepare_feature_specs_for_training(
        [feature(table_spec=spec, input_shape=(8, 1))], 1, 1
    )
    return spec


def facts(features):
    return {name: str(spec) for name, spec in rs.EmbeddingCollection(features).table_specs.items()}


ACCEPTED = """
repr(table(vocabulary_size=np.int64(9), embedding_dim=np.int32(4))) => repr(table())
table(dtype=jnp.bfloat16).dtype => "bfloat16"
table(dtype=jnp.dtype("bfloat16")).dtype => "bfloat16"
table(dtype="bfloat16").dtype => "bfloat16"
table(dtype=np.dtype("float16")).dtype => table(dtype="float16").dtype
table(vocabulary_size=2**33, storage=rs.Hashed()).vocabulary_size => 2**33
repr(feature(input_shape=[8, 1])) => repr(feature(input_shape=(8, 1)))
facts({"x": {"y": feature()}}) => facts([feature()])
facts((feature(),)) => facts([feature()])
facts(feature()) => facts([feature()])
facts([feature("a", table()), feature("b", table())]) => facts([feature("a"), feature("b")])
str(one(mesh=mesh(), sharding_axis=["shard"]).layout) => str(one(mesh=mesh()).layout)
str(rs.optimizers.SGD(np.float32(0.5))) => str(rs.optimizers.SGD(0.5))
rs.optimizers.SGD(1).get_learning_rate() + 0.0 => 1.0
str(plan(groups=(("s", "t"),))) => str(plan(groups=[["s", "t"]]))
tuple(map(float, rs.QuantizationConfig(0, 1, 4).as_tuple())) => (0.0, 1.0, 4.0)
"""
