"""Layers in training: which keys get rows, full tables, and counters.

Worked cases check the results of lookups and gradients, and tests/storage checks training.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags, sok
from tests.sok.training import by_key, context, step, step_of
from tests.world import assert_close, assert_same

DIM = 5


def test_a_jitted_step_does_what_an_eager_one_does():
    keys = np.random.default_rng(5).integers(-12, 30, (4, 16, 2, 3)).clip(-1).astype(np.int32)
    # The samples of the last device in the second batch are padding.
    keys[1, -2:] = -1
    eager, jitted = (
        sok.DistributedEmbedding("mean", 30, DIM, 2, 3, key_dtype="int32", context=context(2))
        for _ in range(2)
    )

    compiled = nnx.jit(lambda layer, keys: step(layer.vjp, keys, gradient=1.0))
    for batch in keys:
        assert_allclose(step(eager.vjp, batch, gradient=1.0), compiled(jitted, batch), atol=1e-7)
    assert_close(sok.export_rows(jitted.variable), sok.export_rows(eager.variable), atol=1e-7)


# Initial values, and full tables


def keys_from(first, count=4):
    return np.arange(first, first + count).reshape(-1, 1, 1)


def small_layer(rows=3, *, num_devices=2, **policies):
    return sok.All2AllDenseEmbedding(rows, DIM, 1, 1, context=context(num_devices), **policies)


def test_one_key_starts_alike_on_any_devices_and_with_or_without_hash_table():
    keys = np.asarray([5, 3, 9, -1, 0, 5, 11, 2]).reshape(8, 1, 1)
    outs = []
    for num_devices, use_hashtable in ((1, True), (4, True), (2, False)):
        layer = small_layer(12, num_devices=num_devices, use_hashtable=use_hashtable)
        outs.append(np.asarray(layer(keys, training=True)))
    assert_array_equal(outs[0], outs[1])
    assert_array_equal(outs[0], outs[2])
    assert not outs[0][3].any() and len(np.unique(outs[0])) > 30


def test_a_full_table_says_so_and_loses_nothing_else():
    layer = small_layer()
    step(layer.vjp, keys_from(0))
    before = sok.export_rows(layer.variable)
    words = r"table 'all2all_dense_embedding' is full: 2 new keys .* when_full='grow'"
    with pytest.raises(RuntimeError, match=words):
        layer.vjp(keys_from(4))
    # Counts of known keys have not changed, either.
    assert_same(sok.export_rows(layer.variable), before)


def test_a_step_says_so_where_another_took_the_room_since_its_lookup():
    layer = small_layer()
    output, backward = layer.vjp(keys_from(4))
    step(layer.vjp, keys_from(0))
    with pytest.raises(RuntimeError, match="is full: 2 new keys"):
        backward(output)
    assert layer.variable.counts()["rows"].tolist() == [3, 3]


def test_a_full_table_grows():
    layer = small_layer(when_full="grow")
    before = step(layer.vjp, keys_from(0))
    # New keys read their initial values.
    assert np.any(step(layer.vjp, keys_from(4)), axis=-1).all()
    assert_array_equal(layer(keys_from(0)), before)
    assert layer.variable.num_rows == 8 and layer.variable.counts()["failed"].sum() == 0


@pytest.mark.slow_rows("2")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_table_grows_by_the_keys_that_are_admitted_and_says_when_no_more_can_wait(num_devices):
    layer = small_layer(
        16,
        num_devices=num_devices,
        when_full="grow",
        admission_count=1,
        admission_capacity=24 // num_devices,
    )
    # 12 keys occur once, then a second time, and then 12 other keys once.
    for first, num_rows in ((0, 0), (0, 12), (100, 12)):
        step(layer.vjp, keys_from(first, 12))
        assert layer.variable.num_rows == num_rows
    words = (
        "is full: 4096 new keys find no room.* keys that wait for one.* admission_capacity larger"
    )
    with pytest.raises(RuntimeError, match=words) as raised:
        step(layer.vjp, keys_from(1000, 4108))
    # The number of rows is not the problem, because the table grows.
    assert "when_full" not in str(raised.value)
    (params,) = layer.variable.get_value().tables.values()
    assert params.rows.shape[0] == 16 * num_devices and layer.variable.num_rows == 12


def test_gradients_of_a_key_never_reach_the_next_owner_of_its_row():
    layer = small_layer(1, num_devices=1, embedding_initializer="zeros", when_full="evict")
    output, backward = layer.vjp(keys_from(5, 1))
    step(layer.vjp, keys_from(5, 1))
    # In a later step, another key can take the row.
    step(layer.vjp, keys_from(6, 1))
    assert list(by_key(layer.variable)) == [6]
    # The gradient is that of key 5, which gets the row again.
    backward(jnp.ones_like(output))
    ((key, row),) = by_key(layer.variable).items()
    assert key == 5 and (row < 0).all()


# Keys and counters


@pytest.mark.slow_rows("int32-2147483647-True")
@pytest.mark.parametrize(
    ("key_dtype", "largest", "use_hashtable"),
    [("int32", 2**31 - 1, True), ("uint32", 2**32 - 1, False)],
)
def test_a_key_beyond_the_tables_dtype_is_refused_in_every_form(key_dtype, largest, use_hashtable):
    variable = sok.embedding_variable(
        "t",
        DIM,
        rows_per_device=9,
        key_dtype=key_dtype,
        use_hashtable=use_hashtable,
        context=context(2),
    )

    def look_up(variable, keys):
        return sok.group_embedding_lookup_sparse([variable], [keys], ["sum"], training=True)

    beyond = np.asarray([[3], [largest + 1]], np.uint64)
    lanes = sok.split_keys(beyond)
    words = f"'t'.*: key {largest + 1} does not fit into key_dtype='{key_dtype}'"
    for keys in (beyond, lanes, Bags(beyond.ravel(), np.arange(3)), beyond.astype(int).tolist()):
        with pytest.raises(ValueError, match=words):
            look_up(variable, keys)
    words = rf"key {2**64 - 2**40} \(of signed numbers: -{2**40}\) does not fit"
    with pytest.raises(ValueError, match=words):
        look_up(variable, np.asarray([[3], [-(2**40)]]))
    (output,) = nnx.jit(look_up)(variable, jax.tree.map(jnp.asarray, lanes))
    assert not np.any(output[1])
    if use_hashtable:
        step_of(variable, np.asarray([[3], [largest]], key_dtype))
        assert list(by_key(variable)) == [3, largest]


def test_counters_go_on_beyond_32_bits():
    layer = small_layer(9)
    state = layer.variable.get_value()
    ((name, params),) = state.tables.items()
    full = jnp.zeros_like(params.counters.inserted).at[:, 1].set(2**32 - 1)
    params = params._replace(counters=params.counters._replace(inserted=full))
    layer.variable.set_value(state._replace(tables={name: params}))
    step(layer.vjp, np.asarray([2, 4, 5, -1]).reshape(4, 1, 1))
    assert layer.variable.counts()["inserted"].tolist() == [2**32 + 1, 2**32]


def test_a_table_that_an_interrupted_step_took_over_says_how_to_go_on():
    layer = small_layer(64, num_devices=1, name="taken")
    layer.vjp(keys_from(0))
    jax.tree.map(lambda array: array.delete(), layer.variable.get_value())
    words = r"table 'taken' has lost its rows .* Ctrl-C .* sok.load the latest dump"
    calls = (
        lambda: layer(keys_from(0)),
        lambda: layer.vjp(keys_from(0)),
        lambda: sok.export_rows(layer.variable),
        layer.variable.counts,
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=words):
            call()
