"""Wrappers and idioms of optax act on dense parameters and rows alike, or raise a helpful error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optax.experimental import aggregating

import rsembed as rs
from tests.flax import interfaces, world

SGD = optax.sgd(0.1)


def assert_same(actual, wanted, rtol=1e-4, atol=1e-6):
    check = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(check, actual, wanted)


# Accumulation over micro-batches


def by_operators(interface, first, second):
    # Gradients of the core are a pair.
    if isinstance(first, tuple):
        dense = jax.tree.map(lambda one, two: (one + two) / 2, first[0], second[0])
        return dense, (first[1] + second[1]) / 2
    return (first + second) / 2


def by_sum(interface, first, second):
    return np.float32(0.5) * sum([first, second])


def by_combine(interface, first, second):
    (one, rows), (two, other_rows) = interface.parts(first), interface.parts(second)
    dense = jax.tree.map(lambda one, two: (one + two) / 2, one, two)
    mean_rows = [rs.scale(rs.combine(*both), 0.5) for both in zip(rows, other_rows, strict=True)]
    return interface.replaced(first, dense, mean_rows)


def by_halves(interface, first, second):
    """Scales the gradients before they are added, so the factors apply to gradients of outputs."""
    return first * 0.5 + jnp.float32(0.5) * second


ACCUMULATED = {
    "(a + b) / 2": by_operators,
    "sum": by_sum,
    "rs.combine": by_combine,
    "a * 0.5 + b * 0.5": by_halves,
}


@functools.cache
def stepped_on_all(name, *storages):
    """Contents of the model after one step on the whole batch."""
    interface = interfaces.ALL[name](*storages)

    @jax.jit
    def step(model):
        return interface.stepped(model, interfaces.gradients_of(interface, model))

    return interface.contents(step(interface.model))


@pytest.mark.slow_rows(
    "linen-rs.combine", "nnx-a * 0.5 + b * 0.5", "nnx-(a + b) / 2", "nnx-rs.combine", "nnx-sum"
)
@pytest.mark.parametrize(
    ("name", "idiom"),
    [("core", "rs.combine"), ("linen", "rs.combine"), *(("nnx", idiom) for idiom in ACCUMULATED)],
)
def test_micro_batches_are_one_step_of_the_mean_in_every_storage(name, idiom):
    interface = interfaces.ALL[name](*world.ALL)

    @jax.jit
    def step(model):
        first = interfaces.gradients_of(interface, model, samples=slice(0, 2))
        second = interfaces.gradients_of(interface, model, samples=slice(2, 4))
        return interface.stepped(model, ACCUMULATED[idiom](interface, first, second))

    assert_same(interface.contents(step(interface.model)), stepped_on_all(name, *world.ALL))


@pytest.mark.slow_rows("False-core", "False-linen", "True-nnx", "True-linen", "True-core")
@pytest.mark.parametrize("name", interfaces.ALL)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_gradients_of_two_programs_are_added_outside_of_them(name, on_mesh):
    interface = interfaces.ALL[name]("dense", "hashed", on_mesh=on_mesh)
    gradients = jax.jit(functools.partial(interfaces.gradients_of, interface))(interface.model)
    mean = by_operators(interface, gradients, gradients)
    head, (actual, *_) = interface.contents(jax.jit(interface.stepped)(interface.model, mean))
    wanted_head, (wanted, *_) = stepped_on_all(name, "dense", "hashed")
    # Both batches count their keys.
    counts = 2 * wanted["hashed"]["count"]
    wanted = wanted | {"hashed": wanted["hashed"] | {"count": counts}}
    assert_same((head, actual), (wanted_head, wanted))


@pytest.mark.parametrize("name", interfaces.ALL)
def test_row_numbers_are_never_added(name):
    """`tests/test_opaque.py` tests all other arithmetic."""
    gradients = interfaces.gradients_of(interfaces.ALL[name]("dense", "hashed"))
    for leaf in jax.tree.leaves(gradients):
        assert not jnp.issubdtype(leaf.dtype, jnp.integer)
    with pytest.raises(TypeError, match=r"key<(row number: add|id: add|key: add)"):
        jax.tree.map(jnp.add, gradients, gradients)


# Skipping


@pytest.mark.slow_rows("linen")
@pytest.mark.parametrize("name", interfaces.ALL)
def test_a_step_is_skipped_or_made_for_all_parts_together(name):
    interface = interfaces.ALL[name](*world.ALL)

    def skipped(model, gradients):
        return model

    @jax.jit
    def step(model, labels):
        gradients = interfaces.gradients_of(interface, model, labels)
        dense, rows = interface.parts(gradients)
        norm = optax.tree.norm(dense) + sum(map(rs.global_norm, rows))
        return jax.lax.cond(jnp.isfinite(norm), interface.stepped, skipped, model, gradients)

    before = interface.contents(interface.model)
    after = interface.contents(step(interface.model, world.LABELS * np.nan))
    assert_same(after, before, rtol=0, atol=0)
    after = interface.contents(step(interface.model, world.LABELS))
    assert_same(after, stepped_on_all(name, *world.ALL))


def even(step):
    return step % 2 == 0


DECIDING = {
    "apply_if_finite": (optax.apply_if_finite(SGD, 5), r"jax\.lax\.cond.* rs\.global_norm"),
    "MultiSteps": (
        optax.MultiSteps(SGD, 4).gradient_transformation(),
        r"\(first \+ second\) / 2.* rs\.combine",
    ),
    "MultiSteps, skip_not_finite": (
        optax.MultiSteps(
            SGD, 1, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        r"to skip one, jax\.lax\.cond on rs\.global_norm",
    ),
    "apply_every": (optax.apply_every(2), r"\(first \+ second\) / 2.* rs\.combine"),
    "aggregating": (
        aggregating.accumulate_avg_updates(2),
        r"\(first \+ second\) / 2.* rs\.combine",
    ),
    "conditionally_transform": (
        optax.conditionally_transform(SGD, even),
        r"jax\.lax\.cond.* rs\.global_norm",
    ),
    "conditionally_mask": (
        optax.conditionally_mask(SGD, even),
        r"jax\.lax\.cond.* rs\.global_norm",
    ),
    "lookahead": (optax.lookahead(SGD, 5, 0.5), "second set of parameters yourself"),
    "sam": (optax.contrib.sam(SGD, SGD), "second set of parameters yourself"),
    "differentially_private_aggregate": (
        optax.contrib.differentially_private_aggregate(1.0, 1.0, key=jax.random.key(0)),
        r"rs\.clip_by_global_norm of each example",
    ),
}
SKIPPING = optax.apply_if_finite(SGD, 5)
NESTED = {
    "masked": optax.masked(SKIPPING, lambda params: jax.tree.map(lambda _: True, params)),
    "partition": optax.partition(
        {"a": SKIPPING, "b": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda _: "a", params),
    ),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: optax.chain(optax.sgd(rate), SKIPPING)
    )(0.1),
}


# `lookahead` warns if it gets only fast parameters.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", DECIDING)
def test_what_decides_about_steps_is_refused_by_name(wrapper):
    tx, way_out = DECIDING[wrapper]
    function = wrapper.partition(",")[0]
    with pytest.raises(
        ValueError, match=rf"tx has optax\.(experimental\.|contrib\.)?{function}, .*{way_out}"
    ):
        interfaces.NNX("dense", tx=tx)


@pytest.mark.parametrize("wrapper", NESTED)
def test_what_decides_about_steps_is_found_in_other_wrappers(wrapper):
    with pytest.raises(ValueError, match=r"tx has optax\.apply_if_finite"):
        interfaces.NNX("dense", tx=NESTED[wrapper])


# Transformations that act on dense parameters only

DENSE_ONLY = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1e-3), SGD),
    "weight decay": optax.adamw(0.1, weight_decay=0.5),
    "freeze": optax.freeze(True),
    "partition": optax.partition({"a": SGD}, lambda params: jax.tree.map(lambda _: "a", params)),
}


@pytest.mark.parametrize(
    ("name", "tx"), [*(("nnx", tx) for tx in DENSE_ONLY), ("linen", "clip_by_global_norm")]
)
def test_rows_are_stepped_by_the_rule_of_their_table_whatever_else_optax_does(name, tx):
    interface = interfaces.ALL[name]("dense", tx=DENSE_ONLY[tx])

    @jax.jit
    def step(model):
        return interface.stepped(model, interfaces.gradients_of(interface, model))

    _, tables = interface.contents(step(interface.model))
    assert_same(tables, stepped_on_all("core", "dense")[1])


# Wrappers as the optimizer of a table: they decide separately for each row

BY_ROW = {
    "apply_if_finite": ([1.0, np.nan, 3.0, 1.0], [0.1, 0.1, 0.4, 0.5]),
    "MultiSteps": ([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.25]),
    "apply_every": ([1.0, 2.0, 3.0, 4.0], [0.0, -3.0, -3.0, -10.0]),
}
"""Gradients of a row, and how far the row has moved after each one.

`apply_every` adds the sum of two gradients.
"""


@pytest.mark.parametrize("wrapper", BY_ROW)
def test_as_the_rule_of_a_table_a_wrapper_decides_for_each_row(wrapper):
    gradients, expected = BY_ROW[wrapper]
    table = rs.TableSpec("t", 4, 2, optimizer=rs.from_optax(DECIDING[wrapper][0]))
    collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
    state = collection.init(jax.random.key(0))
    before, moved = collection.tables(state)["t"], []
    for gradient in gradients:
        state = collection.update(state, {"f": [[1]]}, {"f": jnp.full((1, 2), gradient)})
        moved.append((before - collection.tables(state)["t"])[1, 0])
    np.testing.assert_allclose(moved, expected, rtol=1e-5)
