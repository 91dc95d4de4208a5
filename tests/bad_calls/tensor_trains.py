"""Bad tensor trains: specs, storages, functions of cores, modules."""

import functools

import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed import tt
from tests.bad_calls.world import KEY, feature, table

SPEC = tt.TTSpec(9, (3, 3), (2, 2), (2,))
DENSE = np.ones((9, 4), np.float32)


@functools.cache
def cores():
    return tuple(jnp.ones(shape) for shape in SPEC.core_shapes)


@functools.cache
def bag():
    return tt.TTEmbeddingBag(9, 4, tt_ranks=[2], use_cache=False)


@functools.cache
def several():
    return tt.TableBatchedTTEmbeddingBag(2, 9, 4, tt_ranks=[2], use_cache=False)


def module(**options):
    return tt.TTEmbeddingBag(9, 4, **({"tt_ranks": [2], "use_cache": False} | options))


def stored(*ranks, dtype="float32", **fields):
    spec = table(storage=tt.TensorTrain(*ranks, **fields), dtype=dtype)
    return rs.EmbeddingCollection([feature(table_spec=spec)])


def with_table(values):
    one = stored((2,))
    return one.with_tables(one.init(KEY(0)), {"word": values})


IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2])

BAD = {
    # Functions of cores
    "a table of a dict": (lambda: tt.full_weight({}, cores()), TypeError, "spec", "TTSpec", "{} (dict)"),
    "a matrix that is none": (lambda: tt.from_tensorly(3), ValueError, "from_tensorly", "cores must be arrays"),
    "rows of a matrix as text": (
        lambda: tt.from_tensorly([np.ones((1, 2, 2, 1))] * 2, "4"), TypeError, "num_embeddings", "'4'",
    ),
    "a matrix of integers": (
        lambda: tt.from_tensorly([np.ones((1, 2, 2, 1))] * 2, dtype=int), ValueError, "dtype", "float32, bfloat16",
    ),
    # TTSpec
    "one core": (lambda: tt.TTSpec(9, (9,), (4,), ()), ValueError, "d >= 2", "tt_p_shapes=[9]"),
    "a rank of zero": (lambda: tt.TTSpec(9, (3, 3), (2, 2), (0,)), ValueError, "tt_ranks", "at least 1", "0"),
    "half a rank": (lambda: tt.TTSpec(9, (3, 3), (2, 2), (2.5,)), TypeError, "tt_ranks[0]", "an integer", "2.5"),
    "too few rows": (lambda: tt.TTSpec(10, (3, 3), (2, 2), (2,)), ValueError, "make 9 rows", "num_embeddings=10"),
    "a column factor of zero": (
        lambda: tt.TTSpec(9, (3, 3), (2, 0), (2,)), ValueError, "tt_q_shapes", "at least 1", "0",
    ),
    "half a row factor": (lambda: tt.TTSpec(9, (3, 3.5), (2, 2), (2,)), TypeError, "tt_p_shapes[1]", "integer", "3.5"),
    "a train of no rows": (lambda: tt.TTSpec(0, (3, 3), (2, 2), (2,)), ValueError, "num_embeddings", "at least 1", "0"),
    "rows of a train as text": (lambda: tt.TTSpec("9", (3, 3), (2, 2), (2,)), TypeError, "num_embeddings", "'9'"),
    "columns that do not multiply": (
        lambda: tt.TTSpec.suggest(9, 4, [2], tt_q_shapes=[2, 3]), ValueError, "tt_q_shapes", "multiply to 6",
        "embedding_dim=4",
    ),
    "two budgets": (
        lambda: tt.TTSpec.for_budget(9, 4, bytes=99, ratio=2.0), ValueError, "exactly one", "bytes=", "ratio=",
    ),
    "a budget that holds nothing": (
        lambda: tt.TTSpec.for_budget(9, 4, bytes=8), ValueError, "8 bytes", "9 x 4", "rank 1",
    ),
    "a ratio of zero": (lambda: tt.TTSpec.for_budget(9, 4, ratio=0), ValueError, "ratio", "(0, inf)", "0"),
    "one core for a budget": (
        lambda: tt.TTSpec.for_budget(9, 4, bytes=999, num_cores=1), ValueError, "num_cores", "[2, inf)", "1",
    ),
    "cores as text": (
        lambda: tt.TTSpec.for_budget(9, 4, bytes=999, num_cores="two"), TypeError, "num_cores", "a number", "str",
    ),
    "a dtype of cores nobody knows": (
        lambda: tt.TTSpec.for_budget(9, 4, bytes=999, dtype="flaot"), ValueError, "dtype", "'flaot'", "float32",
    ),
    "no factors": (lambda: tt.suggested_tt_shapes(0, 3), ValueError, "suggested_tt_shapes", "n=0"),
    # Storage
    "neither ranks nor bytes": (lambda: stored(), ValueError, "TensorTrain", "tt_ranks or bytes"),
    "factors beside bytes": (lambda: stored(bytes=999, tt_p_shapes=(3, 3)), ValueError, "leave tt_p_shapes"),
    "ranks of a storage as a number": (
        lambda: stored(2), TypeError, "TensorTrain: tt_ranks", "each an integer", "got 2",
    ),
    "a distribution nobody knows": (
        lambda: stored((2,), weight_dist="gauss"), ValueError, "weight_dist 'gauss'", "normal",
    ),
    "factors that do not fit the table": (
        lambda: stored((2,), tt_p_shapes=(2, 2)), ValueError, "table 'word'", "make 4 rows", "num_embeddings=9",
    ),
    "too few bytes for the table": (lambda: stored(bytes=8), ValueError, "table 'word'", "8 bytes"),
    "float16 cores": (
        lambda: stored((2,), dtype="float16"), ValueError, "table 'word'", "float32 or bfloat16", "float16",
    ),
    # Functions of cores
    "cores of another spec": (
        lambda: tt.rows(tt.TTSpec(9, (3, 3), (4, 1), (2,)), cores(), jnp.array([1])), ValueError, "cores have shapes",
    ),
    "a spec that is none": (lambda: tt.rows((9, 4), cores(), jnp.array([1])), TypeError, "TTSpec", "tuple"),
    "rows of float ids": (lambda: tt.rows(SPEC, cores(), jnp.array([1.5])), TypeError, "ids", "integers", "float32"),
    "a kernel nobody knows": (
        lambda: tt.rows(SPEC, cores(), jnp.array([1]), implementation="fast"), ValueError, "'fast'", "plain",
    ),
    "a bag's mode nobody knows": (
        lambda: tt.bag(SPEC, cores(), rs.Bags.from_lists([[1]]), mode="max"), ValueError, "mode", "'max'",
        "'sum' or 'mean'",
    ),
    "lists for a bag": (lambda: tt.bag(SPEC, cores(), [[1]]), TypeError, "Bags", "list", "Bags.from_lists"),
    "the weight of other cores": (
        lambda: tt.full_weight(SPEC, cores()[:1]), ValueError, "cores have shapes", "spec asks for",
    ),
    "cores of a distribution nobody knows": (
        lambda: tt.init_cores(KEY(0), SPEC, "gauss"), ValueError, "'gauss'", "normal",
    ),
    "uniform rows of rank one": (
        lambda: tt.init_cores(KEY(0), tt.TTSpec(9, (3, 3), (2, 2), (1,)), "approx-uniform"), ValueError,
        "ranks of at least 2", "[1]",
    ),
    "cores of integers": (
        lambda: tt.init_cores(KEY(0), SPEC, dtype=jnp.int32), ValueError, "dtype", "int32", "float32",
    ),
    # From and to tables
    "ranks and an error": (
        lambda: tt.from_dense(DENSE, ranks=2, max_relative_error=0.1), ValueError, "from_dense", "exactly one",
    ),
    "a table with NaN": (lambda: tt.from_dense(DENSE * np.nan, ranks=2), ValueError, "the table", "(9, 4)", "finite"),
    "a negative error": (
        lambda: tt.from_dense(DENSE, max_relative_error=-0.1), ValueError, "max_relative_error", "-0.1",
    ),
    "rounding to nothing": (lambda: tt.round_cores(SPEC, cores()), ValueError, "round_cores", "exactly one"),
    "rounding to too many ranks": (
        lambda: tt.round_cores(SPEC, cores(), ranks=[1, 1]), ValueError, "ranks", "each boundary of 2 cores", "[1, 1]",
    ),
    "a matrix from one array": (
        lambda: tt.from_tensorly(np.ones((3, 3))), ValueError, "from_tensorly", "[R, p, q, R]", "(3,), (3,)",
    ),
    # Modules
    "no ranks": (lambda: module(tt_ranks=None), TypeError, "tt_ranks is missing", "tt_ranks=[16]"),
    "ranks twice": (lambda: tt.TTEmbeddingBag(9, 4, [2], [3, 3], [2, 2], [2]), TypeError, "optimizer", "got [2]"),
    "an optimizer nobody knows": (lambda: module(optimizer="adma"), ValueError, "optimizer", "'adma'", "ADAM"),
    "an optimizer that is not fused": (
        lambda: module(optimizer=tt.OptimType.LAMB), NotImplementedError, "OptimType.LAMB has no fused update",
    ),
    "float16 cores of a module": (lambda: module(dtype="float16"), ValueError, "'float16'", "float32, bfloat16"),
    "a dtype of a module nobody knows": (
        lambda: module(dtype="flaot32"), ValueError, "dtype", "'flaot32'", "float32, bfloat16",
    ),
    "a negative rate of a module": (lambda: module(learning_rate=-1.0), ValueError, "learning_rate", "-1.0"),
    "eps of NaN": (lambda: module(eps=NAN), ValueError, "eps", "[0, inf)", "nan"),
    "a negative cache": (lambda: module(cache_size=-1), ValueError, "cache_size", "[0, inf)", "-1"),
    "a negative count table": (lambda: module(hashtbl_size=-4), ValueError, "hashtbl_size", "[0, inf)", "-4"),
    "a negative schedule": (lambda: module(populate_every=-1), ValueError, "populate_every", "[0, inf)", "-1"),
    "a truth value as a number": (
        lambda: module(populate_every=True), TypeError, "populate_every", "an integer", "True",
    ),
    "a cache above its count table": (
        lambda: module(use_cache=True, cache_size=4, hashtbl_size=3), ValueError, "hashtbl_size=3", "cache_size=4",
    ),
    "cached rows beyond int32": (
        lambda: tt.TTEmbeddingBag(2**31, 1, [1], [2**16, 2**15], [1, 1]), ValueError, "exceeds 2147483647",
    ),
    "an argument nobody knows": (
        lambda: module(cache_sise=3), TypeError, "no argument 'cache_sise'", "did you mean 'cache_size'?",
    ),
    "gradients scaled by frequency": (
        lambda: module(scale_grad_by_freq=True), NotImplementedError, "scale_grad_by_freq",
    ),
    "a padding id outside": (lambda: module(padding_idx=9), ValueError, "padding_idx=9", "no row"),
    "a bounds check nobody knows": (lambda: module(bounds_check="clip"), ValueError, "bounds_check", "'clip'"),
    "renormalised rows": (lambda: module(max_norm=1.0), NotImplementedError, "max_norm=1.0"),
    "rows of other tables": (
        lambda: tt.TableBatchedTTEmbeddingBag(2, [9, 9, 9], 4, tt_ranks=[2]), ValueError, "num_embeddings", "3",
        "2 tables",
    ),
    # Their batches
    "a batch without offsets": (lambda: bag()(IDS), ValueError, "(3,)", "need offsets"),
    "a batch of floats": (lambda: bag()(np.array([1.5]), np.array([0])), TypeError, "indices", "integers", "float64"),
    "lists beside offsets": (lambda: bag()([[1], [2]], OFFSETS), ValueError, "offsets go with flat indices", "(2, 1)"),
    "a batch of None": (lambda: bag()(None, OFFSETS), ValueError, "offsets go with flat indices", "()"),
    "offsets of floats": (lambda: bag()(IDS, np.array([0.0, 2.0])), TypeError, "offsets", "integers", "float64"),
    "offsets that fall": (lambda: bag()(IDS, np.array([0, 3, 2])), ValueError, "offsets", "never fall"),
    "an id outside": (
        lambda: bag()(np.array([9]), np.array([0])), ValueError, "id 9 in sample 0", "TTEmbeddingBag",
        "vocabulary_size=9",
    ),
    "an id outside one of several tables": (
        lambda: several()(np.array([[1], [9]])), ValueError, "id 9 in sample 0", "table 'TableBatchedTTEmbeddingBag 1'",
    ),
    "offsets beside bags": (lambda: bag()(rs.Bags.from_lists([[1]]), OFFSETS), ValueError, "neither beside them"),
    "ids of bags behind their last offset": (
        lambda: bag()(rs.Bags(IDS, np.array([0, 2]))), ValueError, "last offset is 2", "1 would be in no bag",
    ),
    "weights of NaN": (lambda: bag()(IDS, OFFSETS, np.array([1, NAN, 1])), ValueError, "weight nan", "sample 0"),
    "too few weights": (lambda: bag()(IDS, OFFSETS, np.ones(2)), ValueError, "per_sample_weights", "2", "3 indices"),
    "weights as a list": (lambda: bag()(IDS, OFFSETS, ["a", "b", "c"]), TypeError, "per_sample_weights", "numbers"),
    "bags for too few tables": (
        lambda: several()(rs.Bags.from_lists([[1], [2], [3]])), ValueError, "3 bags", "2 tables",
    ),
    "a gradient of another batch": (
        lambda: bag().vjp(IDS, OFFSETS)[1](np.ones((3, 4), np.float32)), ValueError, "d_output", "(3, 4)", "(2, 4)",
    ),
    "a gradient of integers": (
        lambda: bag().vjp(IDS, OFFSETS)[1](np.ones((2, 4), int)), TypeError, "d_output", "floats", "int64",
    ),
    "masked ids": (lambda: bag()(np.ma.masked_equal(IDS, 1), OFFSETS), TypeError, "indices", "masked array"),
    "a gradient of None": (lambda: bag().vjp(IDS, OFFSETS)[1](None), TypeError, "d_output", "NoneType"),
    "a backward pass twice": (lambda: _twice(), RuntimeError, "already stepped", "look the batch up again"),
    "the state of another module": (
        lambda: bag().load_state_dict(module(tt_ranks=[1]).state_dict()), ValueError, "tables/0/tt_ranks",
        "another module",
    ),
    "a state that is none": (lambda: bag().load_state_dict([1, 2]), TypeError, "the state", "a mapping", "[1, 2]"),
    "a rate set to NaN": (lambda: bag().set_learning_rate(NAN), ValueError, "learning_rate", "nan"),
    "the cores of a table nobody knows": (lambda: several().cores_of(2), ValueError, "no table 2", "2 tables"),
    "the weights of a table nobody knows": (lambda: several().full_weight(2), ValueError, "no table 2", "2 tables"),
}  # fmt: skip


def _twice():
    one = module()
    output, backward = one.vjp(IDS, OFFSETS)
    backward(output)
    backward(output)


def looked_up(*batch):
    return bag()(*batch)


ACCEPTED = """
str(tt.TTSpec(9, [3, 3], [2, 2], [2])) => str(SPEC)
str(tt.TTSpec(np.int64(9), np.array([3, 3]), (2, 2), (2,))) => str(SPEC)
looked_up([1, 2, 3], [0, 2]) => looked_up(IDS, OFFSETS)
str(module(optimizer="adam").rule) => str(module(optimizer=tt.OptimType.ADAM).rule)
module(learning_rate=1).learning_rate.get_value() => module(learning_rate=1.0).learning_rate.get_value()
str(module(dtype="bfloat16").dtype) => str(module(dtype=jnp.bfloat16).dtype)
"""
