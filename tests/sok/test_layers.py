"""Layers that train: which keys get rows, what full tables do, and what is counted.

Worked cases hold the numbers of lookups and gradients, the contract of storages those of training.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags, sok
from rsembed.optimizers import Adagrad
from tests.sok.training import context

BATCH, SLOTS, NNZ, DIM, STEPS = 16, 2, 3, 5, 4
LEARNING_RATE = 0.3


def start(key, shape):
    return jnp.full(shape, 0.25)


def insert(layer, keys):
    """Keys get their rows in a step without gradients, which leaves what they start from."""
    out, backward = layer.vjp(keys)
    backward(jnp.zeros_like(out))
    return np.asarray(out)


def test_a_jitted_step_does_what_an_eager_one_does():
    generator = np.random.default_rng(5)
    keys = generator.integers(-12, 30, (STEPS, BATCH, SLOTS, NNZ)).clip(-1).astype(np.int32)
    keys[1, -2:] = -1  # the share of the last device is padding alone
    targets = generator.normal(size=(STEPS, BATCH, SLOTS, DIM))
    rule = Adagrad(LEARNING_RATE)
    options = {"embedding_initializer": start, "optimizer": rule, "key_dtype": "int32"}
    made = [
        sok.DistributedEmbedding("mean", 30, DIM, SLOTS, NNZ, context=context(2), **options)
        for _ in range(2)
    ]

    def step(layer, keys, targets):
        out, backward = layer.vjp(keys)
        backward((out - targets) / BATCH)
        return out

    jitted = nnx.jit(step)
    for own, target in zip(keys, targets.astype(np.float32), strict=True):
        eager, compiled = step(made[0], own, target), jitted(made[1], own, target)
        assert_allclose(eager, compiled, atol=1e-7)
    left, right = (sok.export_rows(layer.variable) for layer in made)
    assert_array_equal(left["keys"], right["keys"])
    assert_allclose(left["values"], right["values"], atol=1e-7)


def test_one_key_starts_alike_on_any_devices_and_with_or_without_hash_table():
    keys = np.asarray([[[5, 3]], [[9, -1]], [[0, 5]], [[11, 2]]])
    outs = []
    for num_devices, use_hashtable in ((1, True), (4, True), (2, False)):
        layer = sok.All2AllDenseEmbedding(
            12, DIM, 1, 2, use_hashtable=use_hashtable, context=context(num_devices)
        )
        outs.append(np.asarray(layer(keys, training=True)))
    assert_array_equal(outs[0], outs[1])
    assert_array_equal(outs[0], outs[2])
    assert not outs[0][1, 0, 1].any() and len(np.unique(outs[0])) > 30


def test_lookups_insert_nothing():
    layer = sok.All2AllDenseEmbedding(12, DIM, 1, 1, dynamic_input=True, context=context(2))
    # As does a lookup for training: its step inserts.
    ahead = layer(np.asarray([1, 2, 2**50]), training=True)
    assert layer.variable.num_rows == 0
    assert_array_equal(insert(layer, np.asarray([1, 2, 2**50])), ahead)
    out = np.asarray(layer(np.asarray([2, 77, 77, 2**50, 1, 78])))
    assert out[[0, 3, 4]].any(axis=1).all() and not out[[1, 2, 5]].any()
    assert layer.variable.num_rows == 3


class TestFullTable:
    def keys(self, first, count):
        return np.arange(first, first + count).reshape(-1, 1, 1)

    def layer(self, **policies):
        return sok.All2AllDenseEmbedding(3, DIM, 1, 1, context=context(2), **policies)

    def test_says_so_and_loses_nothing_else(self):
        layer = self.layer()
        before = insert(layer, self.keys(0, 4))
        rows = sok.export_rows(layer.variable)
        with pytest.raises(
            RuntimeError,
            match=r"table 'all2all_dense_embedding' is full: 2 new keys .* when_full='grow'",
        ):
            layer.vjp(self.keys(4, 4))
        assert_array_equal(layer(self.keys(0, 4)), before)
        for name, array in sok.export_rows(layer.variable).items():  # nothing was counted either
            assert_array_equal(array, rows[name], err_msg=name)

    def test_says_so_in_the_step_where_another_took_the_room_since_the_lookup(self):
        layer = self.layer()
        (first, step_first), (second, step_second) = (
            layer.vjp(self.keys(0, 4)),
            layer.vjp(self.keys(4, 4)),
        )
        step_first(jnp.zeros_like(first))
        with pytest.raises(RuntimeError, match="is full: 2 new keys"):
            step_second(jnp.zeros_like(second))
        assert layer.variable.counts()["rows"].tolist() == [3, 3]

    def test_grows(self):
        layer = self.layer(when_full="grow")
        before = insert(layer, self.keys(0, 4))
        # Read as what their rows start from.
        assert insert(layer, self.keys(4, 4)).any(axis=-1).all()
        assert_array_equal(layer(self.keys(0, 4)), before)
        assert layer.variable.num_rows == 8 and layer.variable.counts()["failed"].sum() == 0

    @pytest.mark.slow_rows("2")
    @pytest.mark.parametrize("num_devices", [1, 2])
    def test_grows_by_the_keys_that_are_admitted_and_says_when_no_more_can_wait(self, num_devices):
        policies = {"when_full": "grow", "admission_count": 1, "context": context(num_devices)}
        policies["admission_capacity"] = 24 // num_devices
        layer = sok.All2AllDenseEmbedding(16, DIM, 1, 1, **policies)
        # 12 keys once, the same again, and others once.
        for first, num_rows in (
            (0, 0),
            (0, 12),
            (100, 12),
        ):
            insert(layer, self.keys(first, 12))
            assert layer.variable.num_rows == num_rows
        refusal = r"is full: 4096 new keys find no room.* keys that wait for one.* admission_capacity larger"
        with pytest.raises(RuntimeError, match=refusal) as raised:
            insert(layer, self.keys(1000, 4108))
        assert "when_full" not in str(raised.value)  # rows do grow
        (params,) = layer.variable.get_value().tables.values()
        assert params.rows.shape[0] == 16 * num_devices and layer.variable.num_rows == 12


def test_gradients_of_a_key_never_reach_the_next_owner_of_its_row():
    layer = sok.All2AllDenseEmbedding(
        1, DIM, 1, 1, embedding_initializer="zeros", when_full="evict", context=context(1)
    )
    _, backward = layer.vjp(np.asarray([[[5]]]))
    _, train = layer.vjp(np.asarray([[[5]]]))
    # The next step, in which the row may go to another key.
    train(np.zeros((1, 1, 1, DIM), np.float32))
    insert(layer, np.asarray([[[6]]]))
    assert sok.export_rows(layer.variable)["keys"].tolist() == [6]
    backward(np.ones((1, 1, 1, DIM), np.float32))  # of key 5, which takes the row back
    rows = sok.export_rows(layer.variable)
    assert rows["keys"].tolist() == [5] and (rows["values"] < 0).all()


@pytest.mark.slow_rows("uint32-4294967295-True")
@pytest.mark.parametrize(
    ("key_dtype", "largest", "use_hashtable"),
    [("int32", 2**31 - 1, True), ("uint32", 2**32 - 1, True), ("uint32", 2**32 - 1, False)],
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

    def look_up(keys):
        return sok.group_embedding_lookup_sparse([variable], [keys], ["sum"], training=True)

    beyond = np.asarray([[3], [largest + 1]], np.uint64)
    forms = [beyond, sok.split_keys(beyond), Bags(beyond.reshape(-1), np.asarray([0, 1, 2]))]
    for keys in [*forms, beyond.astype(np.int64).tolist()]:
        with pytest.raises(
            ValueError, match=rf"'t'.*: key {largest + 1} does not fit into key_dtype='{key_dtype}'"
        ):
            look_up(keys)
    negative = np.asarray([[3], [-(2**40)]])
    with pytest.raises(
        ValueError, match=rf"key {2**64 - 2**40} \(of signed numbers: -{2**40}\) does not fit"
    ):
        look_up(negative)
    lanes = jax.tree.map(jnp.asarray, sok.split_keys(beyond))
    out = nnx.jit(
        lambda variable, keys: sok.group_embedding_lookup_sparse([variable], [keys], ["sum"])[0]
    )(variable, lanes)
    assert not np.asarray(out[1]).any()
    if use_hashtable:
        (output,), backward = sok.group_embedding_lookup_vjp(
            [variable], [np.asarray([[3], [largest]], key_dtype)], ["sum"]
        )
        backward([output])
        assert sok.export_rows(variable)["keys"].tolist() == [3, largest]


def test_counters_go_on_beyond_32_bits():
    layer = sok.All2AllDenseEmbedding(9, DIM, 1, 1, dynamic_input=True, context=context(2))
    before = layer.variable.get_value()
    ((name, params),) = before.tables.items()
    full = params.counters.inserted.at[:].set(jnp.asarray([0, 2**32 - 1], jnp.uint32))
    params = params._replace(counters=params.counters._replace(inserted=full))
    layer.variable.set_value(before._replace(tables={name: params}))
    insert(layer, np.asarray([2, 4, 5]))
    assert layer.variable.counts()["inserted"].tolist() == [2**32 + 1, 2**32]


def test_a_table_that_an_interrupted_step_took_over_says_how_to_go_on():
    layer = sok.All2AllDenseEmbedding(64, 4, 1, 1, name="taken", context=context(1))
    keys = np.arange(8).reshape(8, 1, 1)
    layer.vjp(keys)
    jax.tree.map(lambda array: array.delete(), layer.variable.get_value())
    calls = (
        layer,
        layer.vjp,
        lambda _: sok.export_rows(layer.variable),
        lambda _: layer.variable.counts(),
    )
    for call in calls:
        with pytest.raises(
            RuntimeError,
            match=r"table 'taken' has lost its rows .* Ctrl-C .* sok.load the latest dump",
        ):
            call(keys)
