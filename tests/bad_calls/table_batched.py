"""Bad calls of the table-batched wing: the module, its batches, its states."""

from functools import cache

import numpy as np

from rsembed import tbe
from tests.bad_calls.world import mesh

HOST, CPU = tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU
CACHED = (9, 4, tbe.EmbeddingLocation.MANAGED_CACHING, CPU)
IDS, OFFSETS = np.array([1, 2, 3, 4]), np.array([0, 1, 2, 3, 4])  # two bags of each table


def module(*specs, **options):
    specs = specs or ((9, 4, HOST, CPU), (5, 4, HOST, CPU))
    return tbe.TableBatchedEmbeddingBags(
        list(specs), **({"bounds_check_mode": tbe.BoundsCheckMode.FATAL} | options)
    )


def row_wise(**options):
    return module(optimizer=tbe.OptimType.EXACT_ROWWISE_ADAGRAD, **options)


@cache
def bags():
    return module(table_names=["word", "user"])


@cache
def single():
    return module((9, 4, HOST, CPU), optimizer=tbe.OptimType.EXACT_ADAGRAD)


@cache
def shared():
    return module(mesh=mesh())


def call(ids=IDS, offsets=OFFSETS, *rest, **options):
    return bags()(ids, offsets, *rest, **options)


def backward(gradient, **options):
    return bags().vjp(IDS, OFFSETS, **options)[1](gradient)


def state_dict(**changes):
    return {
        name: array
        for name, array in (single().state_dict() | changes).items()
        if array is not None
    }


BAD = """
# Tables
tbe.TableBatchedEmbeddingBags([]) => ValueError: embedding_specs ... at least one table
module((-1, 4, HOST, CPU)) => ValueError: table 'table_0' ... -1 rows
module((2**31, 4, HOST, CPU)) => ValueError: table 'table_0' ... 32-bit ... hash
module((9, 4, tbe.EmbeddingLocation.MTIA, CPU)) => ValueError: table 'table_0' ... MTIA ... DEVICE
module(table_names=["word"]) => ValueError: table_names ... 2 different names ... ['word']
module(feature_table_map=[0, 2]) => ValueError: feature ... reads table 2 ... there are 2 tables
module(feature_table_map=[0, 0]) => ValueError: ['table_1'] ... feature_table_map
module((0, 4, HOST, CPU), mesh=mesh()) => ValueError: 'table_0' has no rows, which a mesh could share
module(CACHED, mesh=mesh()) => NotImplementedError: 'table_0' cannot be shared ... HostCached
module(pooling_mode="NONE", mesh=mesh()) => NotImplementedError: PoolingMode.NONE has one row per id
module(device="cpu", mesh=mesh()) => ValueError: device='cpu' and a mesh do not go together
row_wise(placement="column", mesh=mesh()) => ValueError: 'table_0', 'table_1' ... 'column': ... steps whole rows
row_wise(weight_decay_mode="DECOUPLE_GLOBAL", global_weight_decay=tbe.GlobalWeightDecayDefinition(), mesh=mesh())
    => NotImplementedError: DECOUPLE_GLOBAL owes decay
# Arguments
module(no_such_argument=None) => TypeError: no_such_argument
call(no_such_argument=None) => TypeError: no_such_argument
module(optimizer="adan") => ValueError: EmbOptimType ... 'adan' ... ADAM
module(optimizer="shampoo") => ValueError: optimizer ... 'shampoo' ... EXACT_SGD
module(optimizer=[tbe.OptimType.ADAM] * 3) => ValueError: optimizer ... 3 entries for 2 tables
module(learning_rate="0.1") => TypeError: learning_rate ... number ... str
module(learning_rate=[0.1] * 3) => ValueError: learning_rate ... 3 entries for 2 tables
module(optimizer=tbe.OptimType.EXACT_ADAGRAD, eps=0.0) => ValueError: eps must be positive ... 1e-10
module(optimizer=tbe.OptimType.EXACT_ROWWISE_ADAGRAD, weight_decay_mode="l3")
    => ValueError: WeightDecayMode ... 'l3' ... L2
module(optimizer=tbe.OptimType.ADAM, weight_decay_mode=tbe.WeightDecayMode.COUNTER) => ValueError: COUNTER ... ADAM
module(pooling_mode="max") => ValueError: PoolingMode ... 'max' ... SUM, MEAN, NONE
module(weights_precision="f32") => ValueError: SparseType ... 'f32' ... FP32
module(weights_precision="int8") => ValueError: weights_precision ... int8 ... FP32
module(output_dtype="int8") => ValueError: output_dtype ... int8 ... FP32, FP16, BF16
module(bounds_check_mode="strict") => ValueError: BoundsCheckMode ... 'strict' ... FATAL
module(device="cuda:7") => ValueError: 'cuda:7' ... cpu:0
row_wise(weight_decay_mode="COUNTER") => ValueError: counter_based_regularization ... COUNTER ... is None; set both
row_wise(weight_decay_mode="COWCLIP") => ValueError: cowclip_regularization ... COWCLIP ... is None
row_wise(weight_decay_mode="DECOUPLE_GLOBAL") => ValueError: global_weight_decay ... is None
row_wise(weight_decay_mode="COUNTER",
    counter_based_regularization=tbe.CounterBasedRegularizationDefinition(
    counter_weight_decay_mode=tbe.CounterWeightDecayMode.L2, counter_halflife=0))
    => ValueError: L2 ... counter_halflife 0 ... set a positive counter_halflife
row_wise(weight_decay_mode="COUNTER",
    counter_based_regularization=tbe.CounterBasedRegularizationDefinition(
    grad_sum_decay=tbe.GradSumDecay.CTR_DECAY))
    => ValueError: grad_sum_decay CTR_DECAY ... GradSumDecay.NO_DECAY
row_wise(weight_decay_mode="COWCLIP", cowclip_regularization=tbe.CowClipDefinition())
    => ValueError: every update is clipped to nothing ... lower_bound
row_wise(weight_decay_mode="COWCLIP", cowclip_regularization=tbe.CowClipDefinition(
    counter_weight_decay_mode=tbe.CounterWeightDecayMode.ADAGRADW, lower_bound=1.0))
    => ValueError: ADAGRADW ... NONE, L2 or DECOUPLE
module((9, 3, HOST, CPU), optimizer=tbe.OptimType.EMAINPLACE_ROWWISE_ADAGRAD)
    => ValueError: EMAINPLACE_ROWWISE_ADAGRAD ... even embedding_dim ... 3
module(optimizer=[tbe.OptimType.NONE, tbe.OptimType.EXACT_SGD]) => ValueError: use it for all tables or none
module(optimizer=tbe.OptimType.ADAM, optimizer_state_dtypes={"momentum3": tbe.SparseType.FP16})
    => ValueError: optimizer_state_dtypes ... 'momentum3' ... momentum1
module(optimizer=tbe.OptimType.EXACT_SGD, optimizer_state_dtypes={"momentum1": tbe.SparseType.FP16})
    => ValueError: EXACT_SGD has no state ... leave the argument out
module(optimizer=tbe.OptimType.ADAM, optimizer_state_dtypes={"momentum1": "int8"})
    => TypeError: optimizer_state_dtypes['momentum1'] ... SparseType.FP32 ... int8
tbe.EnsembleModeDefinition(step_ema_coef=1.2) => ValueError: EnsembleModeDefinition: step_ema_coef must be in [0, 1]
tbe.CowClipDefinition(lower_bound=-1.0) => ValueError: CowClipDefinition: lower_bound must be in [0, inf)
tbe.GlobalWeightDecayDefinition(lower_bound=NAN) => ValueError: GlobalWeightDecayDefinition: lower_bound must be in
# Caches
module(CACHED, optimizer=tbe.OptimType.ENSEMBLE_ROWWISE_ADAGRAD) => NotImplementedError: goes over whole tables
module(CACHED, optimizer=tbe.OptimType.EMAINPLACE_ROWWISE_ADAGRAD) => NotImplementedError: goes over whole tables
module(CACHED, optimizer=tbe.OptimType.EXACT_ROWWISE_ADAGRAD, weight_decay_mode="COUNTER",
    counter_based_regularization=tbe.CounterBasedRegularizationDefinition())
    => NotImplementedError: weight_decay_mode COUNTER goes over whole tables
module(CACHED, optimizer=rs.sok.optimizers.Adam(0.1))
    => NotImplementedError: TensorFlowAdam goes over whole tables
module(CACHED, cache_algorithm="fifo") => ValueError: CacheAlgorithm ... 'fifo' ... LRU
module(CACHED, cache_algorithm=tbe.CacheAlgorithm.LFU, prefetch_pipeline=True) => ValueError: prefetch_pipeline ... LRU
module(CACHED, cache_sets=1).get_cache_miss_counter() => RuntimeError: record_cache_miss_counter=True
bags().get_uvm_cache_stats() => RuntimeError: MANAGED_CACHING ... gather_uvm_cache_stats
# Batches
bags()(IDS) => TypeError: offsets is missing
call(IDS + 0.5) => TypeError: indices ... integers ... float64
call(IDS, OFFSETS[::-1]) => ValueError: offsets begin with 4, but the first bag must begin at 0
call(IDS, [0, 2, 1, 3, 4]) => ValueError: feature 'word': bag 1 goes from offset 2 to 1, but offsets must never fall
call(IDS, [0, 2, 7, 3, 4]) => ValueError: feature 'word': bag 1 goes from offset 2 to 7 ... there are 4 ids
call(IDS, [0, 1, 2, 3, 3]) => ValueError: the last offset is 3, but there are 4 ids
call([1, 2, -2, 3]) => ValueError: feature 'user': id -2 at position 0 of bag 0 ... table 'user' with 5 rows
bags().vjp([1, 2, 3, 5], OFFSETS) => ValueError: 'user': id 5 at position 0 of bag 1 ... table 'user' with 5 rows
jax.jit(lambda own: shared()(own, OFFSETS))(jnp.asarray(IDS))
    => ValueError: indices and offsets cannot be split inside jit; ... module.prepare
jax.jit(lambda own: bags().prepare(own, OFFSETS))(jnp.asarray(IDS)) => RuntimeError: call it outside of jit
shared()(IDS, OFFSETS, batch_size_per_feature_per_rank=[[2], [2]])
    => ValueError: got [2, 2]; leave batch_size_per_feature_per_rank out
shared()([1, 2], [0, 1, 2]) => ValueError: 'table_0': a batch of 1 samples cannot be split over 2 devices
shared()(shared().prepare(IDS, OFFSETS), OFFSETS) => ValueError: a prepared batch holds offsets
call(IDS, OFFSETS[:4]) => ValueError: offsets has 4 entries ... 2 features
call(np.array([1, 9, 3, 4])) => ValueError: feature 'word' ... table 'word' ... 9 rows
call(IDS, OFFSETS, np.ones(4, int)) => TypeError: per_sample_weights ... floats ... int64
call(IDS, OFFSETS, np.ones(3)) => ValueError: per_sample_weights ... (3,) ... 4 indices
call(IDS, OFFSETS, np.array([1, NAN, 1, 1])) => ValueError: per_sample_weights: nan ... row 1
module((9, 4, HOST, CPU), pooling_mode=tbe.PoolingMode.NONE)(IDS, OFFSETS, np.ones(4))
    => ValueError: per_sample_weights ... PoolingMode.NONE
call(batch_size_per_feature_per_rank=[[2]])
    => ValueError: batch_size_per_feature_per_rank ... 2 rows, one per feature ... [1]
call(batch_size_per_feature_per_rank=[[2], [1]])
    => ValueError: batch_size_per_feature_per_rank ... 3 bags ... there are 5
call(batch_size_per_feature_per_rank=[2, 2]) => TypeError: batch_size_per_feature_per_rank [feature][rank] ... 2
module((9, 4, HOST, CPU), pooling_mode=tbe.PoolingMode.NONE)(IDS, OFFSETS, batch_size_per_feature_per_rank=[[4]])
    => ValueError: needs pooled bags
bags()(bags().prepare(IDS, OFFSETS), OFFSETS) => ValueError: a prepared batch holds offsets, weights and sizes
# Gradients and states
backward(np.ones((3, 8), np.float32)) => ValueError: gradient ... (3, 8) ... (2, 8)
backward(np.ones((2, 8), int)) => TypeError: gradient ... floats ... int64
backward(np.ma.masked_less(np.ones((2, 8)), 0)) => TypeError: gradient ... masked array
call(np.ma.masked_equal(IDS, 1)) => TypeError: indices ... masked array ... filled(-1)
call(IDS, OFFSETS, np.ma.masked_less(np.ones(len(IDS), np.float32), 0))
    => TypeError: per_sample_weights ... masked array
backward(np.ones((2, 8), np.float32), feature_requires_grad=[1])
    => ValueError: feature_requires_grad ... (1,) ... 2 numbers
bags().vjp(IDS, OFFSETS, total_unique_indices=1)[1].row_gradients(np.ones((2, 8), np.float32))
    => ValueError: total_unique_indices is 1
twice(*module(table_names=["word", "user"]).vjp(IDS, OFFSETS)) => RuntimeError: used already ... vjp
bags().apply(rs.RowGradients({"t": jnp.array([1])}, {"t": jnp.ones((1, 4))}, (("t", 9),)))
    => ValueError: belong to another collection or module ... backward
module(learning_rate=lambda step: 0.1).set_learning_rate(1.0) => ValueError: schedule
single().apply(rs.RowGradients({"table_0": jnp.array([1])}, {"table_0": jnp.ones((1, 3))}, (("table_0", 9),)))
    => ValueError: stack 'table_0': rows (1,) and values (1, 3) do not fit each other or the table
single().apply(rs.RowGradients({"table_0": jnp.array([1, 2])}, {"table_0": jnp.ones((1, 4))}, (("table_0", 9),)))
    => ValueError: stack 'table_0': rows (2,) and values (1, 4) do not fit each other or the table
bags().set_learning_rate(NAN) => ValueError: learning_rate must be in
bags().set_learning_rate("0.1") => TypeError: learning_rate ... number ... str
bags().init_embedding_weights_uniform(0.1, NAN) => ValueError: max_val must be in
bags().init_embedding_weights_uniform(1.0, 0.0) => ValueError: min_val ... (-inf, 0.0] ... 1.0
bags().init_embedding_weights_uniform(0.0, "1") => TypeError: max_val ... number ... str
single().load_state_dict(state_dict(**{"table_0.weight": None})) => ValueError: lacks ['table_0.weight']
single().load_state_dict(state_dict(x=np.ones(1))) => ValueError: unknown entries ['x']
single().load_state_dict(state_dict(**{"table_0.weight": np.ones((9, 5))}))
    => ValueError: 'table_0.weight' ... (9, 5) ... (9, 4)
single().load_state_dict(state_dict(**{"table_0.weight": np.full((9, 4), "a")}))
    => TypeError: 'table_0.weight' ... numbers ... <U1
bags().set_embedding_weights(1, np.ones((6, 4)))
    => ValueError: table 'user': 'weights' has shape (6, 4), but the module has (5, 4)
bags().set_embedding_weights(3, np.ones((5, 4))) => ValueError: there is no table 3
single().load_state_dict([1]) => TypeError: the state dict ... a mapping ... [1]
single().load_state_dict(state_dict(**{"table_0.weight": np.full((9, 4), 1e300)}))
    => ValueError: 'table_0.weight' ... too large for float32; clip them
single().set_embedding_weights(0, np.full((9, 4), NAN)) => ValueError: table 'table_0': 'weights': nan in row 0
single().load_state_dict(state_dict(**{"table_0.weight": np.full((9, 4), -np.inf)}))
    => ValueError: the state dict: 'table_0.weight': -inf in row 0 is not finite ... allow_nonfinite
single().load_state_dict(state_dict(**{"table_0.sum": np.full((9, 4), -1.0)}))
    => ValueError: the state dict: 'table_0.sum': -1.0 in row 0 is negative
module((9, 4, HOST, CPU), learning_rate=lambda step: step * NAN).get_learning_rate()
    => ValueError: what the schedule learning_rate gives: nan
single().set_embedding_weights(0, np.full((9, 4), 1e300))
    => ValueError: 'table_0' ... 'weights' ... too large for float32
single().load_state_dict(module((9, 4, HOST, CPU), optimizer=tbe.OptimType.ADAM).state_dict()) => ValueError: exp_avg
tbe.functional.lookup(bags().plan, single().state.get_value(), bags().plan.batch(IDS, OFFSETS, None))
    => ValueError: does not belong
"""


ACCEPTED = """
call(IDS.tolist(), OFFSETS.tolist()) => call()
call(jnp.asarray(IDS), jnp.asarray(OFFSETS)) => call()
call(IDS.astype(np.uint64)) => call()
call(IDS, OFFSETS, [1.0] * 4) => call()
module(feature_table_map=(0, 1)).feature_names => module(feature_table_map=[0, 1]).feature_names
"""
