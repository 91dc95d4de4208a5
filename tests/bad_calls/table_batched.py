"""Bad calls of the table-batched wing: the module, its batches, its states."""

import functools

import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed.tbe import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmbeddingLocation,
    GradSumDecay,
    OptimType,
    PoolingMode,
    SparseType,
    TableBatchedEmbeddingBags,
    WeightDecayMode,
    functional,
)

HOST, CPU = EmbeddingLocation.HOST, ComputeDevice.CPU
CACHED = (9, 4, EmbeddingLocation.MANAGED_CACHING, CPU)
NAN = float("nan")
IDS, OFFSETS = np.array([1, 2, 3, 4]), np.array([0, 1, 2, 3, 4])  # two bags of each table


def module(*specs, **options):
    specs = specs or ((9, 4, HOST, CPU), (5, 4, HOST, CPU))
    return TableBatchedEmbeddingBags(list(specs), **({"bounds_check_mode": BoundsCheckMode.FATAL} | options))


def row_wise(**options):
    return module(optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, **options)


def counting(**config):
    regularization = CounterBasedRegularizationDefinition(**config)
    return row_wise(weight_decay_mode="COUNTER", counter_based_regularization=regularization)


def clipping(**config):
    return row_wise(weight_decay_mode="COWCLIP", cowclip_regularization=CowClipDefinition(**config))


def stored_states(optimizer, **dtypes):
    return module(optimizer=optimizer, optimizer_state_dtypes=dtypes)


@functools.cache
def bags():
    return module(table_names=["word", "user"])


@functools.cache
def single():
    return module((9, 4, HOST, CPU), optimizer=OptimType.EXACT_ADAGRAD)


@functools.cache
def cached():
    return module(CACHED, cache_sets=1)


def call(ids=IDS, offsets=OFFSETS, *rest, **options):
    return bags()(ids, offsets, *rest, **options)


def backward(gradient, **options):
    return bags().vjp(IDS, OFFSETS, **options)[1](gradient)


def state_dict(**changes):
    return {name: array for name, array in (single().state_dict() | changes).items() if array is not None}


BAD = {
    # Tables
    "no tables": (lambda: TableBatchedEmbeddingBags([]), ValueError, "embedding_specs", "at least one table"),
    "fewer than no rows": (lambda: module((-1, 4, HOST, CPU)), ValueError, "table 'table_0'", "-1 rows"),
    "rows beyond int32": (lambda: module((2**31, 4, HOST, CPU)), ValueError, "table 'table_0'", "32-bit", "hash"),
    "a device nobody has": (
        lambda: module((9, 4, EmbeddingLocation.MTIA, CPU)), ValueError, "table 'table_0'", "MTIA", "DEVICE",
    ),
    "too few names": (lambda: module(table_names=["word"]), ValueError, "table_names", "2 different names", "['word']"),
    "a feature of a table that is not there": (
        lambda: module(feature_table_map=[0, 2]), ValueError, "feature", "reads table 2", "there are 2 tables",
    ),
    "a table without a feature": (
        lambda: module(feature_table_map=[0, 0]), ValueError, "['table_1']", "feature_table_map",
    ),
    # Arguments
    "an unknown optimizer": (lambda: module(optimizer="adan"), ValueError, "EmbOptimType", "'adan'", "ADAM"),
    "a deprecated optimizer": (lambda: module(optimizer="shampoo"), ValueError, "optimizer", "'shampoo'", "EXACT_SGD"),
    "optimizers of other tables": (
        lambda: module(optimizer=[OptimType.ADAM] * 3), ValueError, "optimizer", "3 entries for 2 tables",
    ),
    "a rate as text": (lambda: module(learning_rate="0.1"), TypeError, "learning_rate", "number", "str"),
    "rates of other tables": (
        lambda: module(learning_rate=[0.1] * 3), ValueError, "learning_rate", "3 entries for 2 tables",
    ),
    "eps of zero": (
        lambda: module(optimizer=OptimType.EXACT_ADAGRAD, eps=0.0), ValueError, "eps must be positive", "1e-10",
    ),
    "an unknown decay mode": (
        lambda: module(optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, weight_decay_mode="l3"), ValueError,
        "WeightDecayMode", "'l3'", "L2",
    ),
    "a mode of another optimizer": (
        lambda: module(optimizer=OptimType.ADAM, weight_decay_mode=WeightDecayMode.COUNTER), ValueError, "COUNTER",
        "ADAM",
    ),
    "an unknown pooling": (lambda: module(pooling_mode="max"), ValueError, "PoolingMode", "'max'", "SUM, MEAN, NONE"),
    "an unknown precision": (lambda: module(weights_precision="f32"), ValueError, "SparseType", "'f32'", "FP32"),
    "a precision nobody trains": (
        lambda: module(weights_precision="int8"), ValueError, "weights_precision", "int8", "FP32",
    ),
    "outputs of integers": (
        lambda: module(output_dtype="int8"), ValueError, "output_dtype", "int8", "FP32, FP16, BF16",
    ),
    "an unknown bounds check": (
        lambda: module(bounds_check_mode="strict"), ValueError, "BoundsCheckMode", "'strict'", "FATAL",
    ),
    "a device that is not there": (lambda: module(device="cuda:7"), ValueError, "'cuda:7'", "cpu:0"),
    "a decay mode without its record": (
        lambda: row_wise(weight_decay_mode="COUNTER"), ValueError, "counter_based_regularization", "COUNTER",
        "is None; set both",
    ),
    "clipping without its record": (
        lambda: row_wise(weight_decay_mode="COWCLIP"), ValueError, "cowclip_regularization", "COWCLIP", "is None",
    ),
    "a global decay without its record": (
        lambda: row_wise(weight_decay_mode="DECOUPLE_GLOBAL"), ValueError, "global_weight_decay", "is None",
    ),
    "a decay by a counter that does not fade": (
        lambda: counting(counter_weight_decay_mode=CounterWeightDecayMode.L2, counter_halflife=0), ValueError, "L2",
        "counter_halflife 0", "set a positive counter_halflife",
    ),
    "sums that decay": (
        lambda: counting(grad_sum_decay=GradSumDecay.CTR_DECAY), ValueError, "grad_sum_decay CTR_DECAY",
        "GradSumDecay.NO_DECAY",
    ),
    "clipping to nothing": (lambda: clipping(), ValueError, "every update is clipped to nothing", "lower_bound"),
    "clipping by a mode of counters": (
        lambda: clipping(counter_weight_decay_mode=CounterWeightDecayMode.ADAGRADW, lower_bound=1.0), ValueError,
        "ADAGRADW", "NONE, L2 or DECOUPLE",
    ),
    "halves of odd columns": (
        lambda: module((9, 3, HOST, CPU), optimizer=OptimType.EMAINPLACE_ROWWISE_ADAGRAD), ValueError,
        "EMAINPLACE_ROWWISE_ADAGRAD", "even embedding_dim", "3",
    ),
    "no optimizer beside one": (
        lambda: module(optimizer=[OptimType.NONE, OptimType.EXACT_SGD]), ValueError, "use it for all tables or none",
    ),
    "state dtypes nobody has": (
        lambda: stored_states(OptimType.ADAM, momentum3=SparseType.FP16), ValueError, "optimizer_state_dtypes",
        "'momentum3'", "momentum1",
    ),
    "state dtypes of no state": (
        lambda: stored_states(OptimType.EXACT_SGD, momentum1=SparseType.FP16), ValueError, "EXACT_SGD has no state",
        "leave the argument out",
    ),
    "states of integers": (
        lambda: stored_states(OptimType.ADAM, momentum1="int8"), TypeError, "optimizer_state_dtypes['momentum1']",
        "int8", "SparseType.FP32",
    ),
    # Caches
    "an unknown algorithm": (
        lambda: module(CACHED, cache_algorithm="fifo"), ValueError, "CacheAlgorithm", "'fifo'", "LRU",
    ),
    "a pipeline of LFU": (
        lambda: module(CACHED, cache_algorithm=CacheAlgorithm.LFU, prefetch_pipeline=True), ValueError,
        "prefetch_pipeline", "LRU",
    ),
    "counts nobody asked for": (
        lambda: cached().get_cache_miss_counter(), RuntimeError, "record_cache_miss_counter=True",
    ),
    "a cache of no table": (
        lambda: bags().get_uvm_cache_stats(), RuntimeError, "MANAGED_CACHING", "gather_uvm_cache_stats",
    ),
    # Batches
    "no offsets": (lambda: bags()(IDS), TypeError, "offsets is missing"),
    "ids of floats": (lambda: call(IDS + 0.5), TypeError, "indices", "integers", "float64"),
    "offsets that fall": (lambda: call(IDS, OFFSETS[::-1]), ValueError, "offsets begin with 4"),
    "offsets that no tables share": (lambda: call(IDS, OFFSETS[:4]), ValueError, "offsets has 4 entries", "2 features"),
    "an id outside": (
        lambda: call(np.array([1, 9, 3, 4])), ValueError, "feature 'word'", "9", "table 'word'", "9 rows",
    ),
    "weights of integers": (
        lambda: call(IDS, OFFSETS, np.ones(4, int)), TypeError, "per_sample_weights", "floats", "int64",
    ),
    "too few weights": (lambda: call(IDS, OFFSETS, np.ones(3)), ValueError, "per_sample_weights", "(3,)", "4 indices"),
    "weights of NaN": (
        lambda: call(IDS, OFFSETS, np.array([1, NAN, 1, 1])), ValueError, "per_sample_weights", "nan", "index 1",
    ),
    "weights where nothing is pooled": (
        lambda: module((9, 4, HOST, CPU), pooling_mode=PoolingMode.NONE)(IDS, OFFSETS, np.ones(4)), ValueError,
        "per_sample_weights", "PoolingMode.NONE",
    ),
    "sizes of too few features": (
        lambda: call(batch_size_per_feature_per_rank=[[2]]), ValueError, "batch_size_per_feature_per_rank",
        "2 rows, one per feature", "[1]",
    ),
    "sizes that do not add up": (
        lambda: call(batch_size_per_feature_per_rank=[[2], [1]]), ValueError, "batch_size_per_feature_per_rank",
        "3 bags", "there are 5",
    ),
    "sizes that are numbers": (
        lambda: call(batch_size_per_feature_per_rank=[2, 2]), TypeError, "batch_size_per_feature_per_rank",
        "[feature][rank]", "2",
    ),
    "sizes where nothing is pooled": (
        lambda: module((9, 4, HOST, CPU), pooling_mode=PoolingMode.NONE)(
            IDS, OFFSETS, batch_size_per_feature_per_rank=[[4]]
        ),
        ValueError, "needs pooled bags",
    ),
    "a dict of bags": (lambda: bags()({"word": [[1]], "user": [[1]]}, OFFSETS), TypeError, "indices", "integers"),
    # Gradients and states
    "a gradient of another batch": (
        lambda: backward(np.ones((3, 8), np.float32)), ValueError, "gradient", "(3, 8)", "(2, 8)",
    ),
    "a gradient of integers": (lambda: backward(np.ones((2, 8), int)), TypeError, "gradient", "floats", "int64"),
    "a masked gradient": (
        lambda: backward(np.ma.masked_less(np.ones((2, 8)), 0)), TypeError, "gradient", "masked array",
    ),
    "masked indices": (lambda: call(np.ma.masked_equal(IDS, 1)), TypeError, "indices", "masked array", "filled(-1)"),
    "masked weights": (
        lambda: call(IDS, OFFSETS, np.ma.masked_less(np.ones(len(IDS), np.float32), 0)), TypeError,
        "per_sample_weights", "masked array",
    ),
    "requirements of too few features": (
        lambda: backward(np.ones((2, 8), np.float32), feature_requires_grad=[1]), ValueError, "feature_requires_grad",
        "(1,)", "2 numbers",
    ),
    "fewer rows than were read": (
        lambda: bags().vjp(IDS, OFFSETS, total_unique_indices=1)[1].row_gradients(np.ones((2, 8), np.float32)),
        ValueError, "total_unique_indices is 1",
    ),
    "a backward pass twice": (lambda: _twice(), RuntimeError, "used already", "vjp"),
    "row gradients of the core": (
        lambda: bags().apply(rs.RowGradients({"t": jnp.array([1])}, {"t": jnp.ones((1, 4))}, (("t", 9),))), ValueError,
        "do not belong to this module", "backward",
    ),
    "a rate set to text": (lambda: bags().set_learning_rate("0.1"), TypeError, "learning_rate", "number", "str"),
    "a negative step": (lambda: bags().set_optimizer_step(-1), ValueError, "set_optimizer_step: step", "-1"),
    "half an optimizer step": (
        lambda: bags().set_optimizer_step(1.5), TypeError, "set_optimizer_step: step", "integer", "1.5",
    ),
    "bounds the wrong way round": (
        lambda: bags().init_embedding_weights_uniform(1.0, 0.0), ValueError, "min_val", "(-inf, 0.0]", "1.0",
    ),
    "a bound as text": (lambda: bags().init_embedding_weights_uniform(0.0, "1"), TypeError, "max_val", "number", "str"),
    "a state dict that lacks an entry": (
        lambda: single().load_state_dict(state_dict(**{"table_0.weight": None})), ValueError,
        "lacks ['table_0.weight']",
    ),
    "a state dict with too much": (
        lambda: single().load_state_dict(state_dict(x=np.ones(1))), ValueError, "unknown entries ['x']",
    ),
    "a state dict of another shape": (
        lambda: single().load_state_dict(state_dict(**{"table_0.weight": np.ones((9, 5))})), ValueError,
        "'table_0.weight'", "(9, 5)", "(9, 4)",
    ),
    "a state dict of texts": (
        lambda: single().load_state_dict(state_dict(**{"table_0.weight": np.full((9, 4), "a")})), TypeError,
        "'table_0.weight'", "numbers", "<U1",
    ),
    "a state dict that is a list": (
        lambda: single().load_state_dict([1]), TypeError, "the state dict", "a mapping", "[1]",
    ),
    "a state dict of numbers that are too large": (
        lambda: single().load_state_dict(state_dict(**{"table_0.weight": np.full((9, 4), 1e300)})), ValueError,
        "'table_0.weight'", "too large for float32", "clip them",
    ),
    "weights that are too large": (
        lambda: single().set_embedding_weights(0, np.full((9, 4), 1e300)), ValueError, "'table_0'", "'weights'",
        "too large for float32",
    ),
    "the state dict of another optimizer": (
        lambda: single().load_state_dict(module((9, 4, HOST, CPU), optimizer=OptimType.ADAM).state_dict()), ValueError,
        "exp_avg",
    ),
    "states of another plan": (
        lambda: functional.lookup(bags().plan, single().state.get_value(), bags().plan.batch(IDS, OFFSETS, None)),
        ValueError, "does not belong",
    ),
}  # fmt: skip


def _twice():
    output, own = module(table_names=["word", "user"]).vjp(IDS, OFFSETS)
    own(output)
    own(output)


ACCEPTED = {
    "ids as lists": (lambda: call(IDS.tolist(), OFFSETS.tolist()), lambda: call()),
    "ids of JAX": (lambda: call(jnp.asarray(IDS), jnp.asarray(OFFSETS)), lambda: call()),
    "ids of uint64": (lambda: call(IDS.astype(np.uint64)), lambda: call()),
    "weights as a list": (lambda: call(IDS, OFFSETS, [1.0] * 4), lambda: call()),
    "a feature map as a tuple": (
        lambda: module(feature_table_map=(0, 1)).feature_names, lambda: module(feature_table_map=[0, 1]).feature_names,
    ),
}  # fmt: skip
