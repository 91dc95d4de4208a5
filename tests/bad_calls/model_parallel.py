"""Bad calls of the model-parallel wing: variables, layers, groups, dumps."""

from functools import cache

import numpy as np
import optax

import rsembed as rs
from rsembed import sok
from tests.bad_calls.world import mesh, new_path


@cache
def context(num_devices=1):
    return sok.Init(mesh=mesh(num_devices))


def made(name="word", dim=4, **options):
    arguments = {"rows_per_device": 4, "context": context()} | options
    return sok.embedding_variable(name, dim, **arguments)


@cache
def variable():
    return made()


@cache
def plain():
    """A variable without a hash table. Its keys are row numbers below 4."""
    return made("number", use_hashtable=False)


def layer(combiner="sum", rows=4, dim=4, slots=1, width=2, **options):
    arguments = {"context": context()} | options
    return sok.DistributedEmbedding(combiner, rows, dim, slots, width, **arguments)


@cache
def pooled():
    return layer()


@cache
def dense():
    return sok.All2AllDenseEmbedding(4, 4, 1, 1, context=context())


KEYS = np.array([[[1, 2]], [[3, -1]]])


def group(params=None, ids=([[1], [2]],), combiners=("sum",), **options):
    params = [variable()] if params is None else params
    return sok.group_embedding_lookup_sparse(params, ids, combiners, **options)


def layered(features):
    return sok.input_layer(features, [sok.EmbeddingColumn("title", variable(), "mean")])


def rows(into=None, **changes):
    arrays = {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | changes
    return sok.assign_rows(
        into or variable(), {name: array for name, array in arrays.items() if array is not None}
    )


@cache
def dumped(make=variable):
    path = new_path("dump")
    sok.dump(path, [make()])
    return path


def of_rule(rule=optax.adam, name="word", **options):
    return made(name, optimizer=rs.from_optax(rule(0.1)), **options)


def with_state_of(other):
    variable_of_rule = of_rule()
    variable_of_rule.set_value(other.get_value())
    return variable_of_rule


BAD = """
# Init
sok.embedding_variable("word", 4, rows_per_device=4) => RuntimeError: sok.Init() ... context=
sok.Init(3, mesh=mesh()) => ValueError: sok.Init: global_batch_size=3 ... 2 devices
sok.Init(batch_size=4, mesh=mesh()) => TypeError: batch_size
# Variables
made(rows_per_device=0) => ValueError: table 'word': rows_per_device ... [1, inf)
made(dim=0) => ValueError: table 'word': embedding_dim ... [1, inf)
made(key_dtype="int16") => ValueError: table 'word' ... 'int16' ... int64
made(initializer="gauss") => ValueError: table 'word' ... 'gauss' ... uniform, normal
made(initializer="glorot_uniform") => ValueError: 'glorot_uniform' ... none may follow from the number of rows
made(ev_option=sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2)), admission_count=2)
    => ValueError: table 'word': ev_option and admission_count say the same; leave one
made(admission_probability=1.5) => ValueError: admission_probability must be in (0, 1], got 1.5
sok.GlobalStepEvict(-1) => ValueError: GlobalStepEvict: steps_to_live must be in [0, inf), got -1
sok.L2WeightEvict("small") => TypeError: L2WeightEvict: l2_weight_threshold must be a number, got 'small'
made(use_hashtable=False, admission_probability=0.5) => ValueError: admission_probability concern hash tables
made(use_hashtable=False, ev_option=sok.EmbeddingVariableOption(sok.GlobalStepEvict(2)))
    => ValueError: evict_option concern hash tables
made(capacity=4) => TypeError: capacity
made(use_hashtable=False, no_such_argument=None) => TypeError: no_such_argument
layer(no_such_argument=None) => TypeError: no_such_argument
sok.All2AllDenseEmbedding(4, 4, 1, 1, context=context(), no_such_argument=None) => TypeError: no_such_argument
sok.embedding_column("title", 4, rows_per_device=8, context=context(), no_such_argument=None)
    => TypeError: no_such_argument
sok.EmbeddingVariableOption(no_such_argument=None) => TypeError: no_such_argument
made(use_hashtable=False, eviction="lru") => ValueError: table 'word': eviction ... use_hashtable is False
variable().evict() => ValueError: evict from table 'word': pass keep=, sok.GlobalStepEvict(...) or ... ev_option
variable().evict(keep=-1) => ValueError: keep must be in [0, inf), got -1
variable().evict(3) => TypeError: evict: option must be of type GlobalStepEvict or of type L2WeightEvict or None, got 3
plain().evict(keep=1) => NotImplementedError: table 'number' has no hash table; its keys keep their rows
sok.split_embedding_variable_from_others(variable()) => ValueError: list or a tuple ... EmbeddingVariable
# Layers
layer("max") => ValueError: layer 'distributed_embedding' ... 'sum', 'mean' or 'sqrtn' ... 'max'
# Batches
pooled()(KEYS / 1) => TypeError: 'distributed_embedding' ... integers ... float64
pooled()([["a"], ["b"]]) => TypeError: distributed_embedding': row 0 ... integers
pooled()([[2**70], [1]]) => TypeError: distributed_embedding': row 0 ... 64 bits
pooled()(np.ones((2, 1, 3), int)) => ValueError: 3 keys ... at most 2 ... max_nnz
layer(context=context(2))(np.ones((3, 1, 2), int)) => ValueError: 'distributed_embedding' ... 3 samples ... 2 devices
pooled()(KEYS, np.ones((2, 1))) => ValueError: 'distributed_embedding': weights ... (2, 1) ... (2, 2)
pooled()(KEYS, np.full((2, 1, 2), NAN, np.float32)) => ValueError: 'distributed_embedding': weight nan in sample 0
pooled()(KEYS, np.full((2, 1, 2), "a")) => TypeError: 'distributed_embedding' ... weights ... numbers ... <U1
sok.group_embedding_lookup_sparse([plain()], [[[8], [1]]], ["sum"]) => ValueError: key 8 ... below 4 ... table 'number'
_overfull() => RuntimeError: table 'distributed_embedding' is full ... max_vocabulary_size_per_gpu
dense()(np.ones((2, 1, 3), int)) => ValueError: layer 'all2all_dense_embedding': bag 0 has 3 keys, but exactly 1
layer(slots=2)([[[1, 2], [3]], [[], [4]]]) => TypeError: row 0 must be a flat list ... nested too deeply
dense()([[1], [1, 2]]) => ValueError: layer 'all2all_dense_embedding': bag 1 has 2 keys, but exactly 1 per slot
sok.All2AllDenseEmbedding(4, 4, 1, 1, True, context=context())(np.ones((2, 1), int))
    => ValueError: dynamic_input ... (2, 1)
pooled().vjp(KEYS)[1](np.ones((3, 1, 4), np.float32))
    => ValueError: table 'distributed_embedding' ... (3, 1, 4) ... (2, 1, 4)
pooled()(KEYS, np.ma.masked_equal(np.ones((2, 1, 2)), 0)) => TypeError: 'distributed_embedding': ... weights ... masked
pooled()(np.ma.masked_equal(KEYS, 1)) => TypeError: 'distributed_embedding': ids ... masked array ... filled(-1)
pooled().vjp(KEYS)[1](np.ones((2, 1, 4), int)) => TypeError: table 'distributed_embedding' ... floats
pooled().vjp(KEYS)[1]("ones") => TypeError: table 'distributed_embedding' ... gradient
pooled().vjp(KEYS)[1](np.ones((2, 1, 4)), np.ones((2, 1, 4))) => ValueError: 1 outputs ... 2 gradients
twice(*pooled().vjp(KEYS)) => RuntimeError: called before ... Look up again
# Groups and columns
group(combiners=["sum", "sum"]) => ValueError: group 'embedding' ... one entry per table ... 'combiners': 2
group(variable()) => TypeError: group 'embedding': params ... list ... EmbeddingVariable
group(combiners="sum") => ValueError: group 'embedding': combiners[0] ... got 's'
group(partition_strategy="div") => NotImplementedError: partition_strategy='div' ... 'mod'
group([variable(), made("user", context=context(2))], [[[1], [2]]] * 2, ["sum"] * 2, name="g")
    => ValueError: group 'g': params[1] (table 'user') lies on the devices ... (table 'word') on ... context
group([with_state_of(of_rule(optax.adamax))])
    => ValueError: table 'word' was given a state that is not its own: ... optimizer is ... adamax ... scale_by_adam
group([with_state_of(of_rule(name="user"))]) => ValueError: not its own: ... user is not expected; word is missing
group([with_state_of(of_rule(dtype="bfloat16"))]) => ValueError: not its own: ... is "bfloat16", expected "float32"
group([with_state_of(of_rule(use_hashtable=False, context=context(2)))])
    => ValueError: not its own: ... num_shards is 2, expected 1
sok.export_rows(with_state_of(of_rule(name="user"))) => ValueError: table 'word' ... not its own
group(["word"]) => TypeError: group 'embedding', params[0] ... str
sok.group_embedding_lookup_vjp([jnp.ones((9, 4))], [[[1]]], ["sum"]) => TypeError: params[0] ... jax.grad
group([jnp.ones((9, 4))], [[[9], [1]]]) => ValueError: params[0]': id 9 in sample 0
group([jnp.ones(9)]) => ValueError: params[0] ... [rows, dim] ... (9,)
layered({"titel": [[1], [2]]}) => ValueError: input_layer ... ['title'] ... ['titel']
sok.input_layer({}, None) => TypeError: input_layer: columns ... list ... None
sok.group_embedding_lookup_vjp(None, [], []) => TypeError: group 'embedding': params ... list ... None
layered([[1], [2]]) => TypeError: input_layer ... mapping ... list
sok.input_layer({"title": [[1]]}, ["title"]) => TypeError: input_layer: columns[0] ... str
sok.embedding_column("title", 4, "max", rows_per_device=8) => ValueError: column 'title' ... 'max'
# Rows in and out
rows(values=None) => ValueError: table 'word' ... 'values'
rows(values=np.ones((2, 3))) => ValueError: table 'word' ... (2, 3) ... (2, 4)
rows(count=[1, 2, 3]) => ValueError: table 'word' ... 'count' ... (3,) ... (2,)
rows(last_step=[0, -1]) => ValueError: table 'word' ... 'last_step' ... [0, 2147
rows(slot_m=np.ones((2, 4))) => ValueError: table 'word': cannot import ['slot_m
rows(keys=np.array([1, 1], np.uint64)) => ValueError: table 'word' ... distinct
rows(keys=np.array([1.0, 2.0])) => TypeError: table 'word' ... float64
rows(keys=[-1, 1]) => ValueError: -1 stands for no key
rows(values=np.full((2, 4), NAN)) => ValueError: its values: nan in row 0 is not finite ... allow_nonfinite
rows(made(optimizer=sok.optimizers.Adam()), slot_velocity=np.full((2, 4), -1.0))
    => ValueError: its slot_velocity: -1.0 in row 0 is negative
rows(made(key_dtype="int32"), keys=[2**40, 1]) => ValueError: does not fit into key_dtype='int32'
rows(made(admission_count=1), waiting_keys=[3, 4], waiting_count=[1])
    => ValueError: 'waiting_count' has shape (1,), not (2,)
rows(slot_accumulator=np.full((2, 4), 1e300))
    => ValueError: 8 numbers of imported 'slot_accumulator' are too large for float32; clip them
sok.dump("never", []) => ValueError: dump ... embedding variables
sok.dump("never", [variable(), made()]) => ValueError: ['word'] ... more than once ... name=
sok.dump(dumped(), [variable()]) => FileExistsError: dump
sok.load(dumped().parent / "dupm", [variable()]) => FileNotFoundError: dupm ... no checkpoint
sok.load(dumped(), [made("user", 3)]) => ValueError: ['word'] ... ['user']
sok.load(dumped(plain), [made("number", use_hashtable=False, rows_per_device=3)])
    => ValueError: table 'number': imported keys must be below 3, the number of rows, got 3
sok.load(dumped(), [made(dim=3)]) => ValueError: table 'word' ... embedding_dim ... assign_rows
"""


def _overfull():
    output, backward = pooled().vjp(KEYS)
    backward(output)
    pooled().vjp(KEYS + 3)


ACCEPTED = """
layer("Mean").combiner => "mean"
pooled()([[1, 2], [3]]) => pooled()(KEYS)
pooled()(KEYS.astype(np.int32)) => pooled()(KEYS)
group([variable()], [[[1], [2]]], ["sum"]) => group((variable(),))
"""
