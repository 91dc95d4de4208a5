"""What two processes with two devices each agree on, refuse together, and learn; started by test_processes.py.

One program for all of it: to start processes takes longer than what they do. Argument: the checkpoint to write.
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
from rsembed import checkpoint, parallel, sok, tbe
from tests.sok import training

SGD = rs.optimizers.SGD(1.0)


def whole(array):
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def by_key(variable):
    rows = sok.export_rows(variable)
    return dict(zip(rows["keys"].tolist(), rows["values"], strict=True))


def inserted(look_up, keys):
    """The lookup of keys that a step without gradients gave their rows."""
    out, backward = look_up(keys)
    backward(jnp.zeros_like(out))
    return look_up(keys)


def _single(looked_up):
    (output,), backward = looked_up
    return output, lambda gradient: backward([gradient])


def rows_of(known, keys):
    found = [known[key] if key >= 0 else np.zeros(3, np.float32) for key in np.ravel(keys).tolist()]
    return np.stack(found).reshape(*np.shape(keys), 3)


def refused(message, call):
    """Both processes raise: process 1 its own error or, like process 0, one that names it."""
    try:
        call()
    except (TypeError, ValueError) as error:
        assert re.search(message, str(error)), (message, str(error))
    else:
        raise AssertionError(f"accepted: {message}")


TABLES = [
    np.arange(18, dtype=np.float32).reshape(9, 2),
    np.arange(10, dtype=np.float32).reshape(5, 2) + 1,
]
FLAT_BATCHES = [  # of each process: ids, offsets of two bags of each table, weights
    (
        np.asarray([1, 8, 8, 0, 4]),
        np.asarray([0, 2, 3, 4, 5]),
        np.asarray([1, 2, 1, 1, 0.5], np.float32),
    ),
    (np.asarray([1, 2, 3, 4]), np.asarray([0, 0, 2, 4, 4]), np.asarray([3, 1, 1, 2], np.float32)),
]


def table_batched_module(process, mesh):
    """The table-batched wing: each process gives its samples, in flat form and prepared for a compiled step."""
    specs = [
        (len(table), 2, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU) for table in TABLES
    ]
    module = tbe.TableBatchedEmbeddingBags(
        specs, optimizer="exact_sgd", learning_rate=1.0, mesh=mesh
    )
    for number, table in enumerate(TABLES):
        module.set_embedding_weights(number, table)
    pooled, sums, d_weights = (
        np.zeros((4, 4)),
        [np.zeros(table.shape) for table in TABLES],
        [[], []],
    )
    for sender, (ids, offsets, weights) in enumerate(FLAT_BATCHES):
        for bag in range(4):
            table, sample = bag // 2, 2 * sender + bag % 2
            for place in range(offsets[bag], offsets[bag + 1]):
                row = TABLES[table][ids[place]]
                pooled[sample, 2 * table : 2 * table + 2] += weights[place] * row
                sums[table][ids[place]] += weights[place]
                d_weights[sender].append(row.sum())
    out, backward = module.vjp(*FLAT_BATCHES[process])
    assert_array_equal(whole(out), pooled)
    assert_array_equal(backward(jnp.ones_like(out)), d_weights[process])

    @nnx.jit
    def step(module, batch):
        out, backward = module.vjp(batch)
        backward(jnp.ones_like(out))

    step(module, module.prepare(*FLAT_BATCHES[process]))
    for found, table, total in zip(module.split_embedding_weights(), TABLES, sums, strict=True):
        assert_array_equal(found, table - 2 * total)
    saved = module.state_dict()
    assert_array_equal(saved["table_0.weight"], TABLES[0] - 2 * sums[0])
    assert int(saved["step"]) == 2
    ids, offsets, _ = FLAT_BATCHES[process]
    fatal = tbe.TableBatchedEmbeddingBags(
        specs, optimizer="exact_sgd", bounds_check_mode="FATAL", mesh=mesh
    )
    message = (
        "id 99 at position 0 of bag 1"
        if process
        else "process 1 refused .*id 99 at position 0 of bag 1"
    )
    refused(message, lambda: fatal(np.where(process, 99, ids), offsets))
    refused(
        "process 1 brings 4 bags",
        lambda: (
            fatal(np.ones(4, int), np.arange(5))
            if process == 0
            else fatal(np.ones(8, int), np.arange(9))
        ),
    )


def main():
    parallel.init(heartbeat_timeout_seconds=60)
    process, context = jax.process_index(), sok.Init()

    # One row per key, from arrays
    layer = sok.All2AllDenseEmbedding(40, 3, 1, 2, optimizer=SGD, name="dense")
    keys = np.asarray([[5, 2**40], [7, 5], [8, 9], [-1, 7], [1, 2], [3, 4], [9, 9], [5, 6]])[
        :, None
    ]
    out, backward = inserted(layer.vjp, np.split(keys, 2)[process])
    known = by_key(layer.variable)
    assert out.shape == (8, 1, 2, 3)
    assert_array_equal(whole(out), rows_of(known, keys))
    backward(jnp.ones_like(out))
    assert_allclose(by_key(layer.variable)[5], known[5] - 3, rtol=1e-6)

    # One row per key, from lists
    layer = sok.All2AllDenseEmbedding(40, 3, 1, 1, dynamic_input=True, optimizer=SGD, name="lists")
    lists = np.asarray([[5, 2**40, 7, -1, -1], [9, 5, 1, 2, 3]])
    out, backward = inserted(layer.vjp, lists[process])
    known = by_key(layer.variable)
    # So that each of the devices has 3.
    filled = np.pad(lists, ((0, 0), (0, 1)), constant_values=-1)
    assert_array_equal(whole(out), rows_of(known, filled).reshape(12, 3))
    backward(jnp.ones_like(out))
    after = by_key(layer.variable)
    for key, times in ((5, 2), (2**40, 1), (3, 1)):
        assert_allclose(after[key], known[key] - times, rtol=1e-6)

    # Groups: bags of other lengths in each process, and a plain table beside an embedding variable
    variable = sok.embedding_variable("hashed", 3, rows_per_device=20, optimizer=SGD)
    plain = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    bags = [[[3], [2**40]], [[4, 3, 3, 8, 1], []]]
    small = [[[1, 2, 3], [4]], [[], [5]]]

    def look_up(plain, training=False):
        tables, ids = [variable, plain], [bags[process], small[process]]
        return sok.group_embedding_lookup_sparse(tables, ids, ["sum", "mean"], training=training)

    pooled, means = look_up(jnp.asarray(plain), training=True)
    inserted(
        lambda ids: _single(sok.group_embedding_lookup_vjp([variable], [ids], ["sum"])),
        bags[process],
    )
    known = by_key(variable)
    for bag, row in zip([*bags[0], *bags[1]], whole(pooled), strict=True):
        assert_allclose(row, sum((known[key] for key in bag), np.zeros(3)), atol=1e-6)
    for bag, row in zip([*small[0], *small[1]], whole(means), strict=True):
        assert_allclose(row, plain[bag].mean(0) if bag else np.zeros(2), atol=1e-6)
    gradient = jax.grad(lambda plain: look_up(plain)[1].sum())(jnp.asarray(plain))
    assert_allclose(whole(gradient)[:, 0], [0, 1 / 3, 1 / 3, 1 / 3, 1, 1, 0, 0, 0], rtol=1e-6)

    # What does not go together is refused by both, and both go on.
    pooled_layer = sok.DistributedEmbedding("sum", 20, 3, 1, 4, optimizer=SGD, name="pooled")
    both = "process 1 brings 8 (samples|bags) .*, process 0 4 (samples|bags)"
    refused(both, lambda: pooled_layer(np.ones((8 if process else 4, 1, 2), int)))
    refused(
        "process 1 brings 4 samples .*, process 0 0 ",
        lambda: pooled_layer(np.ones((4 * process, 1, 2), int)),
    )
    refused(
        "4 samples of an array .4, 3. .* 0 4 .* .4, 2.",
        lambda: pooled_layer(np.ones((4, 1, 2 + process), int)),
    )
    refused("process 1 brings 6 samples", lambda: layer([1, 2, 3, 4, 5, 6][: 4 + process]))
    weights = np.ones((4, 1, 2), np.float32) if process else None
    refused(
        ".4, 2. with weights, process 0 .* without",
        lambda: pooled_layer(np.ones((4, 1, 2), int), weights),
    )
    message = (
        "ids must be integers"
        if process
        else r"process 1 refused what it was given \(TypeError: .*ids must be"
    )
    refused(message, lambda: pooled_layer(np.full((4, 1, 2), 7.0 if process else 7)))
    message = "process 1 brings layer 'lists' with feature 'lists', process 0 layer 'pooled' with feature 'pooled'; all"
    refused(message, lambda: layer([1, 2]) if process else pooled_layer(np.ones((4, 1, 2), int)))
    refused(
        r"\(table 'hashed'\)\": process 1 brings 4 bags",
        lambda: sok.group_embedding_lookup_sparse(
            [variable], [[[1]] * (4 if process else 2)], ["sum"]
        ),
    )
    # As many samples, of other widths.
    out, _ = inserted(pooled_layer.vjp, [[5] * (1 + process)] * 2)
    assert_allclose(
        whole(out)[[0, 2], 0], [by_key(pooled_layer.variable)[5] * n for n in (1, 2)], rtol=1e-6
    )

    # A collection reads batches with the same checks
    table = rs.TableSpec("t", 9, 2, initializer=jax.nn.initializers.ones)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=context.mesh)
    state = collection.init(jax.random.key(0))
    refused(
        f"feature 'f': {both}",
        lambda: collection.prepare({"f": np.ones((8 if process else 4, 2), int)}),
    )
    refused(
        "process 1 brings 4 samples of an array",
        lambda: collection.prepare({"f": np.ones((4, 2 + process), int)}),
    )
    refused(
        "4 bags .*, process 0 4 samples of",
        lambda: collection.prepare({"f": [[1]] * 4 if process else np.ones((4, 1), int)}),
    )
    message = (
        "id 9 in sample 0 is outside"
        if process
        else "process 1 refused .*id 9 in sample 0 is outside"
    )
    refused(message, lambda: collection.prepare({"f": [[9 * process]] * 4}))
    refused(
        "unknown" if process else "process 1 refused",
        lambda: collection.prepare({"fg"[process]: [[1]] * 4}),
    )
    # Processes agree on one size of their lists, also where one of them has no id.
    for length in (3, 0, 12):
        rows = [[1] * length if process else [1]] * 2
        batch = collection.prepare({"f": rows})
        assert batch["f"].to_lists() == rows
        assert batch.lists["t"].ids.shape == ({3: 8, 0: 8, 12: 16}[length] * 4,)
        found, statistics = collection.lookup(state, batch, return_statistics=True)
        assert_array_equal(whole(found["f"])[:, 0], [1, 1, length, length])
        assert int(statistics.num_ids["f"]) == 2 + 2 * length
    stepped = collection.update(
        state, collection.prepare({"f": [[1], []] if process else [[], []]}), found
    )
    changed = (np.asarray(collection.tables(stepped)["t"]) != 1).any(axis=1)
    assert_array_equal(np.flatnonzero(changed), [1])

    table_batched_module(process, context.mesh)
    print("all agreed")
    checkpoint.save(sys.argv[1], training.train(sok.Init(global_batch_size=training.BATCH)))
    page = (Path(__file__).parents[2] / "docs" / "sok.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})


if __name__ == "__main__":
    main()
