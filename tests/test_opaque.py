"""Opaque arrays of row numbers, ids and keys go through every transformation, but no arithmetic."""

import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rsembed import opaque
from tests.world import assert_same, mesh_of

NUMBERS = {kind: np.array([0, 7, 5, 2**31 - 1], opaque.DTYPES[kind]) for kind in opaque.DTYPES}
ROWS = NUMBERS["row"]
LOOP = {
    "scan": lambda add, x: jax.lax.scan(lambda sum, _: (add(sum, x), None), x, None, length=2),
    "while": lambda add, x: jax.lax.while_loop(lambda _: True, lambda sum: add(sum, x), x),
    "vmap": lambda add, x: jax.vmap(add)(x[None], x[None]),
    "jit": lambda add, x: jax.jit(add)(x, x),
    "eager": lambda add, x: add(x, x),
}


def rows():
    return opaque.wrap(jnp.asarray(ROWS), "row")


@pytest.mark.parametrize("kind", opaque.DTYPES)
def test_numbers_come_back_with_dtype_and_shape(kind):
    jitted = jax.jit(opaque.wrap, static_argnums=1), jax.jit(opaque.unwrap)
    for shape in ((4,), (2, 2), (0, 4)):
        numbers = np.resize(NUMBERS[kind], shape)
        for wrap, unwrap in ((opaque.wrap, opaque.unwrap), jitted):
            wrapped = wrap(jnp.asarray(numbers), kind)
            assert (opaque.kind_of(wrapped), wrapped.shape) == (kind, shape)
            np.testing.assert_array_equal(unwrap(wrapped), numbers, strict=True)


@pytest.mark.parametrize("loop", LOOP)
@pytest.mark.parametrize(
    "arithmetic",
    [
        jnp.add,
        jnp.multiply,
        jnp.maximum,
        lambda one, _: one * 0.5,
        lambda one, _: -one,
        lambda one, two: sum([one, two]),
        optax.tree.add,
        optax.apply_updates,
        lambda one, two: optax.incremental_update(one, two, 0.5),
        lambda one, _: jnp.sum(one),
        lambda one, _: jnp.cumsum(one),
        lambda one, _: one.at[0].add(one[0]),
    ],
)
def test_arithmetic_is_a_type_error(loop, arithmetic):
    with pytest.raises(
        (TypeError, ValueError),
        match=r"key<row number: add row gradients by \+ or rs\.combine>|dtype|data type|scalar",
    ):
        LOOP[loop](arithmetic, rows())


def test_no_collective_adds_them():
    for collective in (jax.lax.psum, jax.lax.pmean):
        summed = jax.shard_map(
            lambda x, do=collective: do(x, "x"),
            mesh=mesh_of(4),
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec(),
        )
        with pytest.raises(TypeError, match="key<row number"):
            summed(rows())


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: jax.lax.scan(lambda carry, _: (carry, carry), x, None, length=2)[1][1],
        lambda x: jax.lax.cond(jnp.asarray(True), lambda x: x, lambda x: x[::-1], x),
        lambda x: jax.vmap(lambda x: x[None])(x)[:, 0],
        lambda x: jax.jit(lambda x: x, donate_argnums=0)(jax.tree.map(jnp.copy, x)),
        lambda x: jnp.where(jnp.asarray(True), x, x[::-1]),
        lambda x: x[jnp.arange(4)],
        lambda x: jax.device_get(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: jax.value_and_grad(lambda v: (v, x), has_aux=True)(1.0)[0][1],
    ],
)
def test_they_travel_unchanged(moved):
    result = moved(rows())
    assert opaque.kind_of(result) == "row"
    assert opaque.unwrap(result).tolist() == ROWS.tolist()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parts_stay_on_their_devices(kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    split = NamedSharding(mesh, PartitionSpec("d"))
    wrapped = opaque.wrap(jax.device_put(jnp.asarray(ROWS), split), "row")
    assert wrapped.sharding == opaque.unwrap(wrapped).sharding == split

    def added(part):
        return opaque.wrap(opaque.unwrap(part) - 1, "row")

    on_each = jax.shard_map(
        added, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
    )
    assert opaque.unwrap(jax.jit(on_each)(wrapped)).tolist() == (ROWS - 1).tolist()


@pytest.mark.slow
def test_another_process_knows_the_numbers_again(tmp_path):
    (tmp_path / "rows").write_bytes(pickle.dumps(rows()))
    program = (
        "import pickle, sys; from rsembed import opaque; "
        "print(opaque.unwrap(pickle.load(open(sys.argv[1], 'rb'))))"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "rows"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == str(jnp.asarray(ROWS))


def test_only_integers_of_a_tree_are_wrapped():
    tree = {
        "id": jnp.asarray(ROWS),
        "key_lane": jnp.ones(2, jnp.uint32),
        "gains": jnp.ones(2),
        "mask": jnp.ones(2, bool),
    }
    wrapped = opaque.wrap_integers(tree)
    for name, leaf in wrapped.items():
        assert opaque.kind_of(leaf) == (name if name in opaque.DTYPES else None)
    assert_same(opaque.unwrap_all(wrapped), tree)


def test_what_is_no_such_array_is_left_alone():
    key = jax.random.key(0)
    for other in (None, 3, object(), key, jnp.ones(2), jax.eval_shape(rows)):
        assert opaque.unwrap(other) is other
