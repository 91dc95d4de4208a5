"""Bad calls of the model-parallel wing: variables, layers, groups, dumps."""

import functools

import jax.numpy as jnp
import numpy as np

from rsembed import sok
from tests.bad_calls.world import mesh, new_path

NAN = float("nan")


@functools.cache
def context(num_devices=1):
    return sok.Init(mesh=mesh(num_devices))


def made(name="word", dim=4, **options):
    return sok.embedding_variable(name, dim, **({"rows_per_device": 4, "context": context()} | options))


@functools.cache
def variable(**options):
    return made(**options)


@functools.cache
def other_variable():
    return made("user", 3)


@functools.cache
def plain():
    """Keys are row numbers below four."""
    return made("number", use_hashtable=False)


def layer(combiner="sum", rows=4, dim=4, slots=1, width=2, **options):
    return sok.DistributedEmbedding(combiner, rows, dim, slots, width, **{"context": context()} | options)


@functools.cache
def pooled():
    return layer()


@functools.cache
def dense():
    return sok.All2AllDenseEmbedding(4, 4, 1, 1, context=context())


def call(keys, *weights):
    return pooled()(keys, *weights)


KEYS = np.array([[[1, 2]], [[3, -1]]])


def group(params=None, ids=None, combiners=None, **options):
    params = [variable()] if params is None else params
    ids = [[[1], [2]]] if ids is None else ids
    return sok.group_embedding_lookup_sparse(params, ids, ["sum"] if combiners is None else combiners, **options)


def column(**options):
    return sok.embedding_column("title", 4, **{"variable": variable()} | options)


def layered(features):
    return sok.input_layer(features, [column()])


def rows(**changes):
    given = {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | changes
    return sok.assign_rows(variable(), {name: array for name, array in given.items() if array is not None})


@functools.cache
def dumped():
    path = new_path("dump")
    sok.dump(path, [variable()])
    return path


BAD = {
    # Init
    "a table before Init": (
        lambda: sok.embedding_variable("word", 4, rows_per_device=4), RuntimeError, "sok.Init()", "context=",
    ),
    "a mesh of another axis": (lambda: sok.Init(mesh=mesh(2, "x")), ValueError, "sok.Init", "axis 'shard'", "('x',)"),
    "a batch that devices cannot share": (
        lambda: sok.Init(3, mesh=mesh()), ValueError, "sok.Init", "global_batch_size=3", "2 devices",
    ),
    "an option of Init nobody knows": (lambda: sok.Init(batch_size=4, mesh=mesh()), TypeError, "batch_size"),
    # Variables
    "no rows": (lambda: made(rows_per_device=0), ValueError, "table 'word'", "rows_per_device", "[1, inf)"),
    "no columns": (lambda: made(dim=0), ValueError, "table 'word'", "embedding_dim", "[1, inf)"),
    "keys of 16 bits": (lambda: made(key_dtype="int16"), ValueError, "table 'word'", "'int16'", "int64"),
    "an initializer nobody knows": (
        lambda: made(initializer="gauss"), ValueError, "table 'word'", "'gauss'", "uniform, normal",
    ),
    "an option nobody knows": (lambda: made(capacity=4), TypeError, "capacity"),
    "policies without a hash table": (
        lambda: made(use_hashtable=False, eviction="lru"), ValueError, "table 'word'", "eviction",
        "use_hashtable is False",
    ),
    "an eviction nobody asked for": (lambda: variable().evict(), ValueError, "table 'word'", "steps_to_live"),
    "an admission in place of an eviction": (
        lambda: sok.EmbeddingVariableOption(sok.CounterFilter(2)), TypeError, "evict_option", "GlobalStepEvict",
    ),
    "growth of a table of numbers": (lambda: plain().grow(8), NotImplementedError, "table 'number'", "no hash table"),
    "growth to less": (lambda: variable().grow(2), ValueError, "table 'word'", "2", "4"),
    "one variable to split": (
        lambda: sok.split_embedding_variable_from_others(variable()), ValueError, "list or a tuple",
        "EmbeddingVariable",
    ),
    # Layers
    "a combiner nobody knows": (
        lambda: layer("max"), ValueError, "layer 'distributed_embedding'", "'sum', 'mean' or 'sqrtn'", "'max'",
    ),
    # Batches
    "keys of floats": (lambda: call(KEYS / 1), TypeError, "'distributed_embedding'", "integers", "float64"),
    "lists of texts": (lambda: call([["a"], ["b"]]), TypeError, "distributed_embedding", "row 0", "integers"),
    "keys beyond 64 bits": (lambda: call([[2**70], [1]]), TypeError, "distributed_embedding", "row 0", "64 bits"),
    "a negative key": (
        lambda: call(np.array([[[1, -5]], [[2, 3]]])), ValueError, "'distributed_embedding'", "key -5", "uint64",
    ),
    "keys of one axis": (
        lambda: call(np.array([1, 2])), ValueError, "'distributed_embedding'", "(2,)", "axis of bags",
    ),
    "keys wider than agreed": (
        lambda: call(np.ones((2, 1, 3), int)), ValueError, "3 keys", "at most 2", "max_nnz",
    ),
    "samples that devices cannot share": (
        lambda: layer(context=context(2))(np.ones((3, 1, 2), int)), ValueError, "'distributed_embedding'",
        "3 samples", "2 devices",
    ),
    "weights of another shape": (
        lambda: call(KEYS, np.ones((2, 1))), ValueError, "'distributed_embedding'", "weights", "(2, 1)",
        "(2, 1, 2)",
    ),
    "weights of NaN": (
        lambda: call(KEYS, np.full((2, 1, 2), NAN, np.float32)), ValueError, "'distributed_embedding'",
        "weight nan in sample 0",
    ),
    "weights of texts": (
        lambda: call(KEYS, np.full((2, 1, 2), "a")), TypeError, "'distributed_embedding'", "weights", "numbers",
        "<U1",
    ),
    "row numbers outside": (
        lambda: sok.group_embedding_lookup_sparse([plain()], [[[8], [1]]], ["sum"]), ValueError, "table 'number'",
        "key 8", "below 4",
    ),
    "rows without room": (
        lambda: _overfull(), RuntimeError, "table 'distributed_embedding' is full",
        "max_vocabulary_size_per_gpu",
    ),
    "keys of another width in a dense layer": (
        lambda: dense()(np.ones((2, 1, 3), int)), ValueError, "layer 'all2all_dense_embedding'", "(2, 1, 3)",
        "[batch, 1, 1]",
    ),
    "bags of several slots in one list": (
        lambda: layer(slots=2)([[[1, 2], [3]], [[], [4]]]), ValueError, "one flat list of keys per bag",
    ),
    "ragged keys in a dense layer": (
        lambda: dense()([[[1]], [[1, 2]]]), ValueError, "layer 'all2all_dense_embedding'", "equally many keys",
        "DistributedEmbedding",
    ),
    "a table as dynamic input": (
        lambda: sok.All2AllDenseEmbedding(4, 4, 1, 1, True, context=context())(np.ones((2, 1), int)), ValueError,
        "dynamic_input", "(2, 1)",
    ),
    "a gradient of another batch": (
        lambda: pooled().vjp(KEYS)[1](np.ones((3, 1, 4), np.float32)), ValueError, "table 'distributed_embedding'",
        "(3, 1, 4)", "(2, 1, 4)",
    ),
    "masked keys": (
        lambda: pooled()(np.ma.masked_equal(KEYS, 1)), TypeError, "'distributed_embedding'", "keys",
        "masked array", "filled(-1)",
    ),
    "a gradient of integers": (
        lambda: pooled().vjp(KEYS)[1](np.ones((2, 1, 4), int)), TypeError, "table 'distributed_embedding'", "floats",
    ),
    "a gradient of text": (
        lambda: pooled().vjp(KEYS)[1]("ones"), TypeError, "table 'distributed_embedding'", "gradient", "str",
    ),
    "two gradients of one output": (
        lambda: pooled().vjp(KEYS)[1](np.ones((2, 1, 4)), np.ones((2, 1, 4))), ValueError, "1 outputs", "2 gradients",
    ),
    "a backward pass twice": (lambda: _twice(), RuntimeError, "called before", "Look up again"),
    # Groups and columns
    "lists of other lengths": (
        lambda: group(combiners=["sum", "sum"]), ValueError, "group 'embedding'", "one entry per table",
        "'combiners': 2",
    ),
    "one variable without a list": (
        lambda: group(variable()), TypeError, "group 'embedding'", "params", "list", "EmbeddingVariable",
    ),
    "combiners as a text": (lambda: group(combiners="sum"), ValueError, "group 'embedding'", "combiners[0]", "got 's'"),
    "another partition": (
        lambda: group(partition_strategy="div"), NotImplementedError, "partition_strategy='div'", "'mod'",
    ),
    "a parameter that is none": (lambda: group(["word"]), TypeError, "group 'embedding'", "params[0]", "str"),
    "a plain table that trains": (
        lambda: sok.group_embedding_lookup_vjp([jnp.ones((9, 4))], [[[1]]], ["sum"]), TypeError, "params[0]",
        "jax.grad",
    ),
    "an id outside a plain table": (
        lambda: group([jnp.ones((9, 4))], [[[9], [1]]]), ValueError, "params[0]", "id 9 in sample 0",
    ),
    "a plain table of one axis": (lambda: group([jnp.ones(9)]), ValueError, "params[0]", "[rows, dim]", "(9,)"),
    "a column that is not in the batch": (
        lambda: layered({"titel": [[1], [2]]}), ValueError, "input_layer", "['title']", "['titel']",
    ),
    "columns of None": (lambda: sok.input_layer({}, None), TypeError, "input_layer: columns", "list", "None"),
    "variables of None": (
        lambda: sok.group_embedding_lookup_vjp(None, [], []), TypeError, "group 'embedding': params", "list", "None",
    ),
    "a batch that is a list": (lambda: layered([[1], [2]]), TypeError, "input_layer", "mapping", "list"),
    "columns by name": (
        lambda: sok.input_layer({"title": [[1]]}, ["title"]), TypeError, "input_layer", "columns[0]", "str",
    ),
    "a column of another dimension": (
        lambda: sok.embedding_column("title", 3, variable=variable()), ValueError, "column 'title'", "dimension=3",
        "rows of 4",
    ),
    "a column of a combiner nobody knows": (
        lambda: sok.embedding_column("title", 4, "max", variable=variable()), ValueError, "column 'title'", "'max'",
    ),
    # Rows in and out
    "rows without values": (lambda: rows(values=None), ValueError, "table 'word'", "'values'"),
    "values of another dim": (lambda: rows(values=np.ones((2, 3))), ValueError, "table 'word'", "(2, 3)", "(2, 4)"),
    "counts of another length": (lambda: rows(count=[1, 2, 3]), ValueError, "table 'word'", "'count'", "(3,)", "(2,)"),
    "a step before the first": (lambda: rows(last_step=[0, -1]), ValueError, "table 'word'", "'last_step'", "[0, 2147"),
    "slots of another rule": (
        lambda: rows(slot_m=np.ones((2, 4))), ValueError, "table 'word'", "cannot import", "slot_m",
    ),
    "a key twice": (lambda: rows(keys=np.array([1, 1], np.uint64)), ValueError, "table 'word'", "distinct"),
    "keys of floats in rows": (lambda: rows(keys=np.array([1.0, 2.0])), TypeError, "table 'word'", "float64"),
    "a dump of nothing": (lambda: sok.dump("never", []), ValueError, "dump", "embedding variables"),
    "a dump of two of one name": (
        lambda: sok.dump("never", [variable(), made()]), ValueError, "['word']", "more than once", "name=",
    ),
    "a dump over another": (lambda: sok.dump(dumped(), [variable()]), FileExistsError, "dump"),
    "a dump that is not there": (
        lambda: sok.load(dumped().parent / "dupm", [variable()]), FileNotFoundError, "dupm", "no checkpoint",
    ),
    "a dump of other tables": (lambda: sok.load(dumped(), [other_variable()]), ValueError, "['word']", "['user']"),
    "a dump of another dim": (
        lambda: sok.load(dumped(), [made(dim=3)]), ValueError, "table 'word'", "embedding_dim", "assign_rows",
    ),
}  # fmt: skip


def _overfull():
    output, backward = pooled().vjp(KEYS)
    backward(output)
    pooled().vjp(KEYS + 3)


def _twice():
    output, backward = pooled().vjp(KEYS)
    backward(output)
    backward(output)


ACCEPTED = {
    "a combiner in capitals": (lambda: layer("Mean").combiner, lambda: "mean"),
    "keys as lists": (lambda: call([[1, 2], [3]]), lambda: call(KEYS)),
    "keys of int32": (lambda: call(KEYS.astype(np.int32)), lambda: call(KEYS)),
    "params as a tuple": (lambda: group((variable(),), ([[1], [2]],), ("sum",)), lambda: group()),
}  # fmt: skip
