"""Two processes with two devices each agree on shapes, refuse the same calls, and train.

test_processes.py starts this program. It is a single program, because starting processes takes
longer than the tests. Argument: path of the checkpoint to write.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint, parallel, sok
from tests.sok import training
from tests.sok.training import by_key, step, step_of
from tests.tbe.oracle import make

SGD = rs.optimizers.SGD(1.0)


def whole(array):
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def ones(*shape):
    return np.ones(shape, int)


def rows_of(variable, keys):
    known = by_key(variable) | {-1: np.zeros(3, np.float32)}
    return np.stack([known[key] for key in keys.ravel().tolist()]).reshape(*keys.shape, 3)


def refused(message, call, *arguments):
    """Asserts that both processes raise an error that matches `message`.

    If only process 1 has a wrong argument, process 0 raises an error that names process 1.
    """
    try:
        call(*arguments)
    except (TypeError, ValueError) as error:
        assert re.search(message, str(error)), (message, str(error))
    else:
        raise AssertionError(f"accepted: {message}")


def of_process_1(message):
    """Pattern for an error of process 1, or for the error of process 0 that quotes it."""
    return message if jax.process_index() else f"process 1 refused .*{message}"


# Ids, offsets and weights of each process. Each of the two tables has two bags in each process.
FLAT_BATCHES = [
    (
        np.asarray([1, 8, 8, 0, 4]),
        np.asarray([0, 2, 3, 4, 5]),
        np.asarray([1, 2, 1, 1, 0.5], np.float32),
    ),
    (np.asarray([1, 2, 3, 4]), np.asarray([0, 0, 2, 4, 4]), np.asarray([3, 1, 1, 2], np.float32)),
]
GLOBAL_BATCH = (
    np.asarray([1, 8, 8, 1, 2, 0, 4, 3, 4]),
    np.asarray([0, 2, 3, 3, 5, 6, 7, 9, 9]),
    np.asarray([1, 2, 1, 3, 1, 1, 0.5, 1, 2], np.float32),
)
PLACES = [[0, 1, 2, 5, 6], [3, 4, 7, 8]]
"""Positions of the ids of each process in the global batch."""


def table_batched_module(process, mesh):
    """Tests a table-batched module on the mesh. Each process passes its part of the samples.

    The expected numbers come from a module on one device with the global batch.
    """
    own_batch = FLAT_BATCHES[process]
    one, many = (
        make(((9, 2), (5, 2)), learning_rate=1.0, mesh=each_mesh) for each_mesh in (None, mesh)
    )
    for module in (one, many):
        module.set_embedding_weights(0, np.arange(18, dtype=np.float32).reshape(9, 2))
        module.set_embedding_weights(1, np.arange(10, dtype=np.float32).reshape(5, 2) + 1)
    expected, backward_of_one = one.vjp(*GLOBAL_BATCH)
    out, backward = many.vjp(*own_batch)
    assert_array_equal(whole(out), expected)
    d_weights = np.asarray(backward_of_one(jnp.ones_like(expected)))
    assert_array_equal(backward(jnp.ones_like(out)), d_weights[PLACES[process]])

    @nnx.jit
    def compiled_step(module, batch):
        out, backward = module.vjp(batch)
        backward(jnp.ones_like(out))

    compiled_step(many, many.prepare(*own_batch))
    compiled_step(one, one.prepare(*GLOBAL_BATCH))
    saved = many.state_dict()
    assert int(saved["step"]) == 2
    for table, weights in enumerate(one.split_embedding_weights()):
        assert_array_equal(many.split_embedding_weights()[table], weights)
        assert_array_equal(saved[f"table_{table}.weight"], weights)
    fatal = make(((9, 2), (5, 2)), bounds_check_mode="FATAL", mesh=mesh)
    message = of_process_1("id 99 at position 0 of bag 1")
    refused(message, fatal, np.where(process, 99, own_batch[0]), own_batch[1])
    num_bags = 4 + 4 * process
    refused("process 1 brings 4 bags", fatal, ones(num_bags), np.arange(num_bags + 1))


def main():
    parallel.init(heartbeat_timeout_seconds=60)
    process, context = jax.process_index(), sok.Init()

    # One row per key, from arrays
    layer = sok.All2AllDenseEmbedding(40, 3, 1, 2, optimizer=SGD, name="dense")
    keys = np.asarray([[5, 2**40], [7, 5], [8, 9], [-1, 7], [1, 2], [3, 4], [9, 9], [5, 6]])
    keys = keys[:, None]
    own_keys = np.split(keys, 2)[process]
    step(layer.vjp, own_keys)
    expected = rows_of(layer.variable, keys)
    assert expected.shape == (8, 1, 2, 3)
    assert_array_equal(whole(step(layer.vjp, own_keys, gradient=1.0)), expected)
    assert_allclose(by_key(layer.variable)[5], expected[0, 0, 0] - 3, rtol=1e-6)

    # One row per key, from lists
    layer = sok.All2AllDenseEmbedding(40, 3, 1, 1, dynamic_input=True, optimizer=SGD, name="lists")
    lists = np.asarray([[5, 2**40, 7, -1, -1], [9, 5, 1, 2, 3]])
    step(layer.vjp, lists[process])
    # With padding, each device has three keys.
    filled = np.pad(lists, ((0, 0), (0, 1)), constant_values=-1)
    before = by_key(layer.variable)
    expected = rows_of(layer.variable, filled).reshape(12, 3)
    assert_array_equal(whole(step(layer.vjp, lists[process], gradient=1.0)), expected)
    after = by_key(layer.variable)
    for key, times in ((5, 2), (2**40, 1), (3, 1)):
        assert_allclose(after[key], before[key] - times, rtol=1e-6)

    # Groups: bags of different lengths in each process, and a plain array beside a variable
    variable = sok.embedding_variable("hashed", 3, rows_per_device=20, optimizer=SGD)
    plain = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    bags = [[[3], [2**40]], [[4, 3, 3, 8, 1], []]]
    small = [[[1, 2, 3], [4]], [[], [5]]]

    def look_up(plain, training=False):
        tables, ids = [variable, plain], [bags[process], small[process]]
        return sok.group_embedding_lookup_sparse(tables, ids, ["sum", "mean"], training=training)

    pooled, means = map(whole, look_up(jnp.asarray(plain), training=True))
    step_of(variable, bags[process])
    for bag, row in zip([*bags[0], *bags[1]], pooled, strict=True):
        assert_allclose(row, rows_of(variable, np.asarray([*bag, -1])).sum(axis=0), atol=1e-6)
    for bag, row in zip([*small[0], *small[1]], means, strict=True):
        assert_allclose(row, plain[bag].mean(axis=0) if bag else np.zeros(2), atol=1e-6)
    gradient = jax.grad(lambda plain: look_up(plain)[1].sum())(jnp.asarray(plain))
    assert_allclose(whole(gradient)[:, 0], [0, 1 / 3, 1 / 3, 1 / 3, 1, 1, 0, 0, 0], rtol=1e-6)

    # Both processes refuse arguments that do not fit together, and can then continue
    pooled_layer = sok.DistributedEmbedding("sum", 20, 3, 1, 4, optimizer=SGD, name="pooled")
    both = "process 1 brings 8 (samples|bags) .*, process 0 4 (samples|bags)"
    refused(both, pooled_layer, ones(4 + 4 * process, 1, 2))
    refused("process 1 brings 4 samples .*, process 0 0 ", pooled_layer, ones(4 * process, 1, 2))
    refused("process 1 brings 6 samples", layer, list(range(4 + process)))
    weights = np.ones((4, 1, 2), np.float32) if process else None
    refused(".4, 2. with weights, process 0 .* without", pooled_layer, ones(4, 1, 2), weights)
    message = "ids must be integers" if process else r"process 1 refused .*TypeError: .*ids must be"
    refused(message, pooled_layer, np.full((4, 1, 2), 7.0 if process else 7))
    message = "process 1 brings layer 'lists' with feature 'lists', process 0 layer 'pooled' with feature 'pooled'; all"
    refused(message, *((layer, [1, 2]) if process else (pooled_layer, ones(4, 1, 2))))
    message = r"\(table 'hashed'\)\": process 1 brings 4 bags"
    refused(message, step_of, variable, [[1]] * (2 + 2 * process))
    # Both processes have the same number of samples, with different numbers of ids.
    step(pooled_layer.vjp, [[5] * (1 + process)] * 2)
    row = by_key(pooled_layer.variable)[5]
    pooled = whole(pooled_layer([[5] * (1 + process)] * 2))
    assert_allclose(pooled[[0, 2], 0], [row, 2 * row], rtol=1e-6)

    # A collection reads batches with the same checks
    table = rs.TableSpec("t", 9, 2, initializer=jax.nn.initializers.ones)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=context.mesh)
    state = collection.init(jax.random.key(0))

    def prepare(ids):
        return collection.prepare({"f": ids})

    refused(f"feature 'f': {both}", prepare, ones(4 + 4 * process, 2))
    refused("4 samples of an array .4, 3. .* 0 4 .* .4, 2.", prepare, ones(4, 2 + process))
    refused("4 bags .*, process 0 4 samples of", prepare, [[1]] * 4 if process else ones(4, 1))
    refused(of_process_1(".*unknown"), collection.prepare, {"fg"[process]: [[1]] * 4})
    # Processes agree on one size of their lists, also if one of them has no ids.
    for length, size in ((3, 8), (0, 8), (12, 16)):
        rows = [[1] * length if process else [1]] * 2
        batch = prepare(rows)
        assert batch["f"].to_lists() == rows
        assert batch.lists["t"].ids.shape == (size * 4,)
        actual, statistics = collection.lookup(state, batch, return_statistics=True)
        assert_array_equal(whole(actual["f"])[:, 0], [1, 1, length, length])
        assert int(statistics.num_ids["f"]) == 2 + 2 * length
    stepped = collection.update(state, prepare([[1], []] if process else [[], []]), actual)
    changed = (np.asarray(collection.tables(stepped)["t"]) != 1).any(axis=1)
    assert_array_equal(np.flatnonzero(changed), [1])

    table_batched_module(process, context.mesh)
    print("all agreed")
    checkpoint.save(sys.argv[1], training.train(sok.Init(global_batch_size=training.BATCH)))
    page = (Path(__file__).parents[2] / "docs" / "sok.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})


if __name__ == "__main__":
    main()
