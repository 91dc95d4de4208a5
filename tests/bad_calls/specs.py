"""Bad tables, features, collections and plans."""

import rsembed as rs
from rsembed.sparsecore import embedding
from tests.bad_calls.world import feature, table


def one(**options):
    return rs.EmbeddingCollection([feature()], **options)


def two():
    return [feature("a", table("s")), feature("b", table("t"))]


def plan(**options):
    return rs.plan_stacking(two(), **options)


BAD = {
    # TableSpec
    "a name that is a number": (lambda: table(3), TypeError, "TableSpec: name", "non-empty string", "3"),
    "no rows": (lambda: table(vocabulary_size=0), ValueError, "table 'word'", "vocabulary_size", "[1, inf)", "got 0"),
    "rows as text": (
        lambda: table(vocabulary_size="9"), TypeError, "table 'word'", "vocabulary_size", "integer", "'9'",
    ),
    "more rows than int32 has": (
        lambda: table(vocabulary_size=2**31), ValueError, "table 'word'", "2147483648 exceeds", "split the table",
    ),
    "an initial number": (
        lambda: table(initializer=0.1), TypeError, "table 'word'", "initializer", "(key, shape)", "0.1",
    ),
    "an optimizer by name": (lambda: table(optimizer="adam"), TypeError, "table 'word'", "OptimizerSpec", "from_optax"),
    "an unknown combiner": (
        lambda: table(combiner="average"), ValueError, "table 'word': combiner must be 'sum' or 'mean' or", "'average'",
    ),
    "an integer dtype": (
        lambda: table(dtype="int8"), ValueError, "table 'word'", "'int8'", "float32, bfloat16, float16",
    ),
    "quantization as a tuple": (
        lambda: table(quantization_config=(0.0, 1.0, 4)), TypeError, "table 'word'", "quantization_config",
        "QuantizationConfig",
    ),
    "rounding as text": (
        lambda: table(stochastic_rounding="no"), TypeError, "table 'word'", "stochastic_rounding", "True or False",
        "'no'",
    ),
    "a class of storages": (lambda: table(storage=rs.Hashed), TypeError, "table 'word'", "storage", "Hashed(...)"),
    "a field set too late": (
        lambda: setattr(_placed(), "combiner", "mean"), AttributeError, "table 'word'", "'combiner'", "before stacking",
    ),
    "buckets outside their bounds": (
        lambda: rs.QuantizationConfig(1.0, 0.0, 4), ValueError, "min_value 1.0", "max_value",
    ),
    "half a bucket": (lambda: rs.QuantizationConfig(0.0, 1.0, 2.5), TypeError, "num_buckets", "integer", "2.5"),
    # FeatureSpec
    "a feature without a name": (lambda: feature(""), TypeError, "FeatureSpec: name", "non-empty string"),
    "a table by its name": (
        lambda: feature(table_spec="word"), TypeError, "feature 'title'", "table_spec", "TableSpec", "str",
    ),
    "a shape that is a number": (
        lambda: feature(input_shape=8), TypeError, "feature 'title'", "input_shape", "list", "got 8",
    ),
    "a shape with a zero": (lambda: feature(input_shape=(8, 0)), ValueError, "feature 'title'", "input_shape", "got 0"),
    "a shape of floats": (lambda: feature(output_shape=(8.0, 4)), TypeError, "feature 'title'", "output_shape", "8.0"),
    "an empty input shape": (lambda: feature(input_shape=()), ValueError, "feature 'title'", "input_shape", "()"),
    "more columns than the table has": (
        lambda: feature(output_shape=(8, 5)), ValueError, "feature 'title'", "5 columns", "table 'word'",
        "embedding_dim=4",
    ),
    # Features together
    "no features": (lambda: rs.EmbeddingCollection([]), ValueError, "no FeatureSpec"),
    "features by name": (lambda: rs.EmbeddingCollection(["title"]), TypeError, "FeatureSpec", "str"),
    "two features of one name": (
        lambda: rs.EmbeddingCollection([feature(), feature()]), ValueError, "unique", "'title'",
    ),
    "two tables of one name": (
        lambda: rs.EmbeddingCollection([feature("a"), feature("b", table(embedding_dim=5))]), ValueError, "'word'",
        "'b'",
    ),
    "keys of several kinds": (
        lambda: rs.EmbeddingCollection({"a": feature("a"), 1: feature("b")}), TypeError, "features", "keys", "order",
        "texts",
    ),
    # EmbeddingCollection
    "an unknown bounds check": (
        lambda: one(bounds_check="clip"), ValueError, "bounds_check", "'raise' or 'ignore'", "'clip'",
    ),
    "an unknown kernel": (lambda: one(implementation="natvie"), ValueError, "'natvie'", "native", "reference"),
    "an axis without a mesh": (lambda: one(sharding_axis="shard"), ValueError, "sharding_axis='shard'", "needs a mesh"),
    "an unknown axis": (
        lambda: one(mesh=mesh(), sharding_axis="shrad"), ValueError, "sharding_axis='shrad'", "('shard',)",
    ),
    "an axis twice": (
        lambda: one(mesh=mesh(), sharding_axis=("shard", "shard")), ValueError, "sharding_axis", "once each", "shard",
    ),
    "a placement without a mesh": (lambda: one(placement="row"), ValueError, "placement='row'", "needs a mesh"),
    "an unknown placement": (
        lambda: one(mesh=mesh(), placement="rows"), ValueError, "table 'word'", "'rows'",
        "row, table, column, replicated",
    ),
    "a placement of an unknown table": (
        lambda: one(mesh=mesh(), placement={"wrod": "row"}), ValueError, "placement", "'wrod'", "'word'",
    ),
    "columns that cannot be split": (
        lambda: rs.EmbeddingCollection(
            [feature(table_spec=table(embedding_dim=3))], mesh=mesh(), placement="column"
        ),
        ValueError, "'word'", "'column'", "embedding_dim=3", "2 devices", "place them 'row'",
    ),
    "a shape that cannot be split": (
        lambda: rs.EmbeddingCollection([feature(output_shape=(3, 4))], mesh=mesh()), ValueError, "feature 'title'",
        "output_shape (3, 4)", "2 devices",
    ),
    # plan_stacking
    "an unknown table in a group": (lambda: plan(groups=[["s", "x"]]), ValueError, "every table once", "'t'", "'x'"),
    "a table in two groups": (lambda: plan(groups=[["s", "t"], ["t"]]), ValueError, "every table once", "'t'"),
    "shards without padding": (lambda: plan(num_shards=2, pad=False), ValueError, "without padding", "pad=True"),
    "a storage in a padded plan": (
        lambda: rs.plan_stacking([feature(table_spec=table(storage=rs.Hashed()))]), NotImplementedError, "'word'",
        "storage=", "EmbeddingCollection",
    ),
    "a stack nobody knows": (lambda: plan().stack("stakc"), KeyError, "'stakc'", "s_t"),
    "a table nobody knows": (lambda: plan().table("wrod"), KeyError, "'wrod'", "'s'", "'t'"),
    "the load of unknown features": (lambda: plan().shard_load({"x": [1]}), ValueError, "'x'", "'a'", "'b'"),
    "the load of ids as text": (lambda: plan().shard_load({"a": ["x"]}), ValueError, "feature 'a'", "integers", "'x'"),
    "a dim as text": (
        lambda: table(embedding_dim="4"),
        TypeError, "table 'word': embedding_dim must be an integer, got '4'", "got '4' (str)",
    ),
    "a list of combiners": (
        lambda: table(combiner=["sum"]), TypeError, "table 'word': combiner must be 'sum' or 'mean'", "got ['sum']",
    ),
    "no dtype": (lambda: table(dtype=None), ValueError, "table 'word': dtype None is not one of float32, bfloat16,"),
    "a list of dtypes": (
        lambda: table(dtype=["float32"]), ValueError, "table 'word': dtype ['float32'] is not one of float32,",
    ),
    "an optimizer that was not made": (
        lambda: table(optimizer=rs.optimizers.SGD), TypeError, "table 'word': optimizer must be made first, as in",
    ),
    "a storage as a dict": (
        lambda: table(storage={}),
        TypeError, "table 'word': storage, such as rsembed.Hashed(...), must be", "got {} (dict)",
    ),
    "a limit of None": (
        lambda: table(max_ids_per_partition=None),
        TypeError, "table 'word': max_ids_per_partition must be an integer, got", "got None (NoneType)",
    ),
    "a negative buffer": (
        lambda: table(suggested_coo_buffer_size_per_device=-1),
        ValueError, "table 'word': suggested_coo_buffer_size_per_device must be", "got -1",
    ),
    "quantization from NaN on": (
        lambda: rs.QuantizationConfig(NAN, 1.0, 4),
        ValueError, "QuantizationConfig: min_value nan must be below max_value",
    ),
    "quantization bounds as text": (
        lambda: rs.QuantizationConfig("0", 1.0, 4),
        TypeError, "QuantizationConfig: min_value must be a number, got '0'", "got '0' (str)",
    ),
    "a nested input shape": (
        lambda: feature(input_shape=((8, 2),)),
        TypeError, "feature 'title': input_shape must be an integer, got (8, 2)", "got (8, 2) (tuple)",
    ),
    "an output of no columns": (
        lambda: feature(output_shape=(8, 0)), ValueError, "feature 'title': output_shape must be in [1, inf), got 0.",
    ),
    "no axis to shard by": (
        lambda: one(mesh=mesh(), sharding_axis=()),
        ValueError, "sharding_axis=() must name axes of the mesh once each,",
    ),
    "a stack by number": (lambda: plan().stack(0), KeyError, "no stack 0; the plan has ['s_t']."),
}  # fmt: skip


def _placed():
    spec = table()
    embedding.prepare_feature_specs_for_training([feature(table_spec=spec, input_shape=(8, 1))], 1, 1)
    return spec


def facts(features):
    return {name: str(spec) for name, spec in rs.EmbeddingCollection(features).table_specs.items()}


ACCEPTED = """
repr(table(vocabulary_size=np.int64(9), embedding_dim=np.int32(4))) => repr(table())
table(dtype=jnp.bfloat16).dtype => table(dtype="bfloat16").dtype
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
