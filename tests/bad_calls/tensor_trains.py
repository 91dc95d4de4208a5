"""Bad tensor trains: specs, storages, functions of cores, modules."""

from functools import cache

import jax.numpy as jnp
import numpy as np
from flax import nnx  # noqa: F401, used by calls of the table

import rsembed as rs
from rsembed import tt
from tests.bad_calls.world import KEY, feature, table

SPEC = tt.TTSpec(9, (3, 3), (2, 2), (2,))
DENSE = np.ones((9, 4), np.float32)


@cache
def cores():
    return tuple(jnp.ones(shape) for shape in SPEC.core_shapes)


@cache
def bag():
    return tt.TTEmbeddingBag(9, 4, tt_ranks=[2], use_cache=False)


@cache
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

BAD = """
# Functions of cores
tt.full_weight({}, cores()) => TypeError: spec ... TTSpec ... {} (dict)
tt.from_tensorly(3) => ValueError: from_tensorly: cores must be arrays
# TTSpec
tt.TTSpec(9, (9,), (4,), ()) => ValueError: d >= 2 ... tt_p_shapes=[9]
tt.TTSpec(9, (3, 3), (2, 2), (0,)) => ValueError: tt_ranks[0] ... [1, inf) ... 0
tt.TTSpec(9, (3, 3), (2, 2), (2.5,)) => TypeError: tt_ranks[0] ... an integer ... 2.5
tt.TTSpec(10, (3, 3), (2, 2), (2,)) => ValueError: make 9 rows ... num_embeddings=10
tt.TTSpec(9, (3, 3), (2, 0), (2,)) => ValueError: tt_q_shapes[1] ... [1, inf) ... 0
tt.TTSpec(9, (3, 3.5), (2, 2), (2,)) => TypeError: tt_p_shapes[1] ... integer ... 3.5
tt.TTSpec(0, (3, 3), (2, 2), (2,)) => ValueError: num_embeddings ... [1, inf) ... 0
tt.TTSpec("9", (3, 3), (2, 2), (2,)) => TypeError: num_embeddings ... '9'
tt.TTSpec.suggest(9, 4, [2], tt_q_shapes=[2, 3]) => ValueError: tt_q_shapes ... multiply to 6 ... embedding_dim=4
tt.TTSpec.for_budget(9, 4, bytes=8) => ValueError: 8 bytes ... 9 x 4 ... rank 1 ... num_cores=2
tt.TTSpec.for_budget(9, 4, bytes=999, num_cores=1) => ValueError: num_cores ... [2, inf) ... 1
tt.TTSpec.for_budget(9, 4, bytes=999, num_cores="two") => TypeError: num_cores ... an integer ... 'two'
tt.TTSpec.for_budget(9, 4, bytes=999, dtype="flaot") => ValueError: dtype 'flaot' ... float32
tt.suggested_tt_shapes(0, 3) => ValueError: suggested_tt_shapes: n ... [1, inf) ... 0
# Storage
stored() => ValueError: TensorTrain ... tt_ranks or bytes
stored(bytes=999, tt_p_shapes=(3, 3)) => ValueError: leave tt_p_shapes
rs.plan_stacking([feature(table_spec=table(storage=tt.TensorTrain((2,))))], num_shards=4)
    => NotImplementedError: use EmbeddingCollection
stored(2) => TypeError: TensorTrain: tt_ranks ... each an integer ... got 2
stored((2,), weight_dist="gauss") => ValueError: weight_dist ... 'normal' ... 'gauss'
stored((2,), tt_p_shapes=(2, 2)) => ValueError: table 'word' ... make 4 rows ... num_embeddings=9
stored(bytes=8) => ValueError: table 'word': 8 bytes
stored((2,), dtype="float16") => ValueError: table 'word' ... float32 or bfloat16
# Functions of cores
tt.rows(tt.TTSpec(9, (3, 3), (4, 1), (2,)), cores(), jnp.array([1])) => ValueError: cores have shapes
tt.rows((9, 4), cores(), jnp.array([1])) => TypeError: TTSpec ... tuple
tt.rows(SPEC, cores(), jnp.array([1.5])) => TypeError: ids ... integers ... float32
tt.rows(SPEC, cores(), jnp.array([1]), implementation="fast") => ValueError: implementation ... 'plain' ... 'fast'
tt.bag(SPEC, cores(), rs.Bags.from_lists([[1]]), mode="max") => ValueError: mode ... 'sum' or 'mean' ... 'max'
tt.bag(SPEC, cores(), [[1]]) => TypeError: Bags.from_lists
tt.full_weight(SPEC, cores()[:1]) => ValueError: cores have shapes ... spec asks for
tt.init_cores(KEY(0), SPEC, "gauss") => ValueError: weight_dist ... 'normal' ... 'gauss'
tt.init_cores(KEY(0), tt.TTSpec(9, (3, 3), (2, 2), (1,)), "approx-uniform") => ValueError: ranks of at least 2 ... [1]
tt.init_cores(KEY(0), SPEC, dtype=jnp.int32) => ValueError: dtype 'int32 ... float32
# From and to tables
with_table(np.ones((8, 4))) => ValueError: table 'word' is kept as a tensor train: pass a whole table [9, 4]
with_table(tuple(np.full(shape, 1e300) for shape in SPEC.core_shapes))
    => ValueError: 'word': ... numbers of imported 'core 0' are too large for float32; clip them
tt.from_dense(SPEC, DENSE * np.nan) => ValueError: from_dense: the table: nan in row 0 is not finite
tt.from_dense(SPEC, DENSE[1:]) => ValueError: the table of shape (8, 4) must hold 9 x 4 numbers
tt.from_dense(SPEC, DENSE[:8]) => ValueError: (8, 4) ... 9 x 4
tt.from_dense(DENSE, DENSE) => TypeError: spec ... TTSpec
tt.round_cores(SPEC, cores(), max_relative_error=-0.1) => ValueError: max_relative_error ... -0.1
tt.round_cores(SPEC, cores(), ranks=[1, 1]) => ValueError: d - 1 ranks ... tt_ranks=[1, 1]
tt.from_tensorly(np.ones((3, 3))) => ValueError: from_tensorly ... [R, p, q, R] ... (3,), (3,)
# Modules
module(tt_ranks=None) => TypeError: tt_ranks is missing ... tt_ranks=[16]
tt.TTEmbeddingBag(9, 4, [2], [3, 3], [2, 2], [2]) => TypeError: optimizer ... got [2]
module(optimizer="adam") => TypeError: optimizer ... OptimType.SGD ... 'adam'
module(optimizer=tt.OptimType.LAMB) => NotImplementedError: OptimType.LAMB has no fused update
module(dtype="float16") => ValueError: 'float16' ... float32, bfloat16
module(dtype="flaot32") => ValueError: dtype 'flaot32' ... float32, bfloat16
module(learning_rate=-1.0) => ValueError: learning_rate ... -1.0
module(eps=NAN) => ValueError: eps ... [0, inf) ... nan
module(use_cache=True, cache_size=4, hashtbl_size=3) => ValueError: hashtbl_size=3 ... cache_size=4
tt.TTEmbeddingBag(2**31, 1, [1], [2**16, 2**15], [1, 1]) => ValueError: exceeds 2147483647
module(cache_sise=3) => TypeError: unexpected keyword argument 'cache_sise'
tt.TableBatchedTTEmbeddingBag(2, [9, 9, 9], 4, tt_ranks=[2]) => ValueError: num_embeddings ... 3 ... 2 tables
tt.TTEmbeddingBag(9, 4, [2], [3, 3], tt_p_shapes=[3, 3]) => TypeError: multiple values for argument 'tt_p_shapes'
tt.TTEmbeddingBag(9, 4, [2], None, None, tt.OptimType.SGD, optimizer=tt.OptimType.SGD)
    => TypeError: multiple values for argument 'optimizer'
tt.TTEmbeddingBag(9, 4, [2], None, None, tt.OptimType.SGD, 0.1, 1e-9, True, False, 0, 0, "normal", True, None)
    => TypeError: takes from 4 to 16 positional arguments but 17
nnx.jit(lambda one, *batch: one(*batch))(module(), IDS, np.array([0, 3]))
    => ValueError: pass include_last_offset=True or False
nnx.jit(lambda one: one.cache_reports())(module(use_cache=True)) => RuntimeError: outside of jit
module(use_cache=True).tt_cores[0].set_value(np.ones((3, 4), np.float32))
    => ValueError: cannot be set alone ... use module.set_cores
bag().set_cores([np.full(shape, NAN, np.float32) for shape in SPEC.core_shapes])
    => ValueError: core 0 for table 0: nan in row 0 is not finite; clean the cores first
# Their batches
several().update_cache([7, 9]) => ValueError: need offsets
bag()(IDS) => ValueError: (3,) need offsets
bag()(np.array([1.5]), np.array([0])) => TypeError: indices ... integers ... float64
bag()(jax.device_put(np.zeros((8, 2), np.int32),
    jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec("shard"))))
    => ValueError: explicit axes ... EmbeddingCollection(mesh=
bag()(None, OFFSETS) => ValueError: offsets go with flat indices ... ()
bag()(IDS, np.array([0.0, 2.0])) => TypeError: offsets ... integers ... float64
bag()(IDS, np.array([0, 3, 2])) => ValueError: offsets ... never fall
bag()(np.array([9]), np.array([0]))
    => ValueError: id 9 in sample 0 ... TTEmbeddingBag ... vocabulary_size=9 ... or use -1 for missing ids.
module(use_cache=True, sparse=False) => NotImplementedError: TTEmbeddingBag: a module ... has no cache ... sparse=True
module(sparse=False).update_cache([3]) => NotImplementedError: TTEmbeddingBag: a module ... moves the state with the row
module(sparse=False).cache_populate() => NotImplementedError: TTEmbeddingBag: a module ... has no cache ... from_optax
several()(np.array([[1], [9]])) => ValueError: id 9 in sample 0 ... table 'TableBatchedTTEmbeddingBag 1'
bag()(rs.Bags.from_lists([[1]]), OFFSETS) => ValueError: neither beside them
bag()(rs.Bags(IDS, np.array([0, 2]))) => ValueError: last offset is 2 ... 1 would be in no bag
bag()(IDS, OFFSETS, np.array([1, NAN, 1])) => ValueError: weight nan ... sample 0
bag()(IDS, OFFSETS, np.ones(2)) => ValueError: per_sample_weights ... 2 ... 3 indices
bag()(IDS, OFFSETS, ["a", "b", "c"]) => TypeError: per_sample_weights ... numbers
several()(rs.Bags.from_lists([[1], [2], [3]])) => ValueError: 3 bags ... 2 tables
bag().vjp(IDS, OFFSETS)[1](np.ones((3, 4), np.float32)) => ValueError: d_output ... (3, 4) ... (2, 4)
bag().vjp(IDS, OFFSETS)[1](np.ones((2, 4), int)) => TypeError: d_output ... floats ... int64
bag()(np.ma.masked_equal(IDS, 1), OFFSETS) => TypeError: indices ... masked array
bag().vjp(IDS, OFFSETS)[1](None) => TypeError: d_output ... NoneType
twice(*module().vjp(IDS, OFFSETS)) => RuntimeError: already stepped ... look the batch up again
bag().set_learning_rate(NAN) => ValueError: learning_rate ... nan
several().cores_of(2) => ValueError: no table 2 ... 2 tables
several().full_weight(2) => ValueError: no table 2 ... 2 tables
"""


ACCEPTED = """
str(tt.TTSpec(9, [3, 3], [2, 2], [2])) => str(SPEC)
str(tt.TTSpec(np.int64(9), np.array([3, 3]), (2, 2), (2,))) => str(SPEC)
bag()([1, 2, 3], [0, 2]) => bag()(IDS, OFFSETS)
module(learning_rate=1).learning_rate.get_value() => module(learning_rate=1.0).learning_rate.get_value()
str(module(dtype="bfloat16").dtype) => str(module(dtype=jnp.bfloat16).dtype)
"""
