"""Bits, traffic and memory of programs on a mesh."""

import functools

import jax
import numpy as np
import pytest

import rsembed as rs
from tests.parallel.hlo import collective_bytes
from tests.world import assert_close, assert_same, made_mesh, mesh_of

BATCH, DIM = 16, 8


def features_of(**changes):
    """Two features of table `t`, and one feature of table `u`."""
    fields = {"optimizer": rs.optimizers.Adagrad(0.1), "initializer": jax.nn.initializers.ones}
    fields |= changes
    t = rs.TableSpec("t", 21, DIM, **fields)
    u = rs.TableSpec("u", 5, DIM, **fields)
    return [rs.FeatureSpec("a", t), rs.FeatureSpec("b", t), rs.FeatureSpec("c", u)]


# Without optimizations, the last bit of approximated normal values depends on the compiled program.
@pytest.mark.usefixtures("more_optimizations")
def test_initial_values_do_not_depend_on_the_mesh():
    features = features_of(initializer=jax.nn.initializers.normal(1.0))
    one = rs.EmbeddingCollection(features)
    expected = one.tables(one.init(jax.random.key(7)))
    for placement in ("row", "table", "column"):
        collection = rs.EmbeddingCollection(features, mesh=mesh_of(4), placement=placement)
        state = collection.init(jax.random.key(7))
        assert_same(collection.tables(state), expected)
        shard_sizes = {
            shard.data.size for array in state.tables.values() for shard in array.addressable_shards
        }
        assert max(shard_sizes) <= (21 if placement == "table" else 7) * DIM


def test_accumulation_and_clipping_inside_a_scan_equal_one_device():
    """Row gradients of two micro-batches are combined for one step."""
    rng = np.random.default_rng(0)
    # The axes are steps, micro-batches of a step, and samples.
    shape = (2, 2, BATCH)
    batches = {
        "a": rng.integers(-1, 21, (*shape, 5), np.int32),
        "b": rng.integers(-1, 4, (*shape, 3), np.int32),
        "c": rng.integers(-1, 5, (*shape, 1), np.int32),
    }
    d_activations = {name: rng.normal(size=(*shape, DIM)).astype(np.float32) for name in batches}
    results = []
    for mesh in (None, made_mesh(4)):
        collection = rs.EmbeddingCollection(features_of(combiner="mean"), mesh=mesh)

        def step(state, micro_batches, collection=collection):
            def gradients(_, inputs):
                batch, d_activations = inputs
                _, pullback = collection.lookup_vjp(state, batch)
                return None, pullback(d_activations)

            combined = rs.combine(jax.lax.scan(gradients, None, micro_batches)[1])
            clipped = rs.clip_by_global_norm(combined, 1.5)
            return collection.apply(state, clipped), rs.global_norm(combined)

        train = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
        state, norms = train(collection.init(jax.random.key(0)), (batches, d_activations))
        results.append((collection.tables(state), collection.slots(state), norms))
    assert (results[0][2] > 1.5).all()
    assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_rows("4-row")
@pytest.mark.parametrize(
    ("num_devices", "placement"),
    [(4, "row"), (8, "row"), (4, "column"), (4, "replicated")],
)
def test_compiled_programs_send_the_bytes_of_the_page(num_devices, placement):
    local_batch, width = 4, 3
    local_ids = local_batch * width
    table = rs.TableSpec("t", 1000, DIM, initializer=jax.nn.initializers.zeros,
        optimizer=rs.optimizers.SGD(0.1),
    )  # fmt: skip
    collection = rs.EmbeddingCollection(
        rs.FeatureSpec("f", table),
        mesh=mesh_of(num_devices),
        placement=placement,
        # With as many places as ids, one round is always sufficient.
        exchange_capacity=local_ids if placement == "row" else None,
    )
    ids = np.zeros((num_devices * local_batch, width), np.int32)

    def step(state, ids):
        activations, statistics = collection.lookup(state, {"f": ids}, return_statistics=True)
        return collection.update(state, {"f": ids}, activations), statistics

    state = collection.init(jax.random.key(0))
    compiled = jax.jit(step).lower(state, ids).compile()
    sent = collective_bytes(compiled.as_text(), num_devices)
    # These are sums of numbers of ids and rounds.
    sent.pop("all-reduce", None)
    pooled, others = local_batch * DIM * 4, num_devices - 1
    # XLA merges equal collectives of a program, so ids are sent once for lookup and update.
    expected = {
        # Keys are sent to the owners, rows back, and gradients to the owners.
        "row": {"all-to-all": others * local_ids * (4 + 2 * DIM * 4)},
        # Each device needs all ids. Parts of activations and of their gradients are exchanged.
        "column": {
            "all-to-all": 2 * pooled * others // num_devices,
            "all-gather": others * local_ids * 4,
        },
        "replicated": {"all-gather": others * (local_ids * 4 + pooled)},
    }
    assert sent == expected[placement]
    _, statistics = compiled(state, ids)
    assert int(statistics.num_rounds["t"]) == (placement == "row")
    assert int(statistics.num_ids["f"]) == ids.size
