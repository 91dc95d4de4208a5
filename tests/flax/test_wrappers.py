"""Wrappers and idioms of optax act on dense parameters and rows alike, or are refused with the way out."""

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

ALL = tuple(world.STORAGES)
FIRST, SECOND = slice(0, 2), slice(2, 4)
SGD = optax.sgd(0.1)


def assert_same(found, wanted, **tolerance):
    for array, expected in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(array, expected, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


# Accumulation over micro-batches


def by_operators(interface, first, second):
    if isinstance(first, tuple):
        return jax.tree.map(lambda one, two: (one + two) / 2, first[0], second[0]), (
            first[1] + second[1]
        ) / 2
    return (first + second) / 2


def by_sum(interface, first, second):
    if isinstance(first, tuple):
        return jax.tree.map(lambda one, two: (one + two) / 2, first[0], second[0]), 0.5 * sum(
            [first[1], second[1]]
        )
    return np.float32(0.5) * sum([first, second])


def by_combine(interface, first, second):
    (one, rows), (two, other_rows) = interface.parts(first), interface.parts(second)
    dense = jax.tree.map(lambda one, two: (one + two) / 2, one, two)
    mean_rows = [rs.scale(rs.combine(*both), 0.5) for both in zip(rows, other_rows, strict=True)]
    return interface.replaced(first, dense, mean_rows)


def by_halves(interface, first, second):
    """Each is scaled before they are added, so that the kernel that makes the first sums sees the factor."""
    if isinstance(first, tuple):
        half = jax.tree.map(lambda one, two: (one + two) / 2, first[0], second[0])
        return half, first[1] * 0.5 + second[1] * jnp.float32(0.5)
    return first * 0.5 + jnp.float32(0.5) * second


ACCUMULATED = {
    "(a + b) / 2": by_operators,
    "sum": by_sum,
    "rs.combine": by_combine,
    "a * 0.5 + b * 0.5": by_halves,
}
IDIOMS = ("(a + b) / 2", "sum", "a * 0.5 + b * 0.5")
"""What the layers offer beside `rs.combine`, which is asked of every interface."""


@functools.cache
def stepped_on_all(name, *storages):
    """What one step on the whole batch makes of a model."""
    interface = interfaces.ALL[name](*storages)

    @jax.jit
    def step(model, batch):
        return interface.stepped(model, interface.gradients(model, batch, interfaces.labels_of()))

    return interface.contents(step(interface.model, interfaces.batch_of(interface)))


@pytest.mark.slow_rows(
    "linen-rs.combine", "nnx-a * 0.5 + b * 0.5", "nnx-(a + b) / 2", "nnx-rs.combine"
)
@pytest.mark.parametrize(
    ("name", "idiom"),
    [*((name, "rs.combine") for name in interfaces.ALL), *(("nnx", idiom) for idiom in IDIOMS)],
)
def test_micro_batches_are_one_step_of_the_mean_in_every_storage(name, idiom):
    interface = interfaces.ALL[name](*ALL)

    @jax.jit
    def step(model, first, second):
        parts = [
            interface.gradients(model, first, interfaces.labels_of(FIRST)),
            interface.gradients(model, second, interfaces.labels_of(SECOND)),
        ]
        return interface.stepped(model, ACCUMULATED[idiom](interface, *parts))

    batches = [interfaces.batch_of(interface, samples) for samples in (FIRST, SECOND)]
    assert_same(interface.contents(step(interface.model, *batches)), stepped_on_all(name, *ALL))


@pytest.mark.slow_rows("False-core", "False-linen", "True-nnx", "True-linen")
@pytest.mark.parametrize("name", interfaces.ALL)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_gradients_of_two_programs_are_added_outside_of_them(name, on_mesh):
    interface = interfaces.ALL[name]("dense", "hashed", on_mesh=on_mesh)
    gradients = jax.jit(interface.gradients)(
        interface.model, interfaces.batch_of(interface), interfaces.labels_of()
    )
    mean = by_operators(interface, gradients, gradients)
    head, (found, *_) = interface.contents(jax.jit(interface.stepped)(interface.model, mean))
    wanted_head, (wanted, *_) = stepped_on_all(name, "dense", "hashed")
    counts = 2 * wanted["hashed"]["count"]  # a key is counted in each of the batches
    wanted = wanted | {"hashed": wanted["hashed"] | {"count": counts}}
    assert_same((head, found), (wanted_head, wanted))


SUMS = {
    "jax.tree.map(jnp.add)": lambda one, two: jax.tree.map(jnp.add, one, two),
    "jax.tree.map, average": lambda one, two: jax.tree.map(lambda a, b: (a + b) / 2, one, two),
    "optax.tree.add": optax.tree.add,
    "optax.tree.scale": lambda one, _: optax.tree.scale(2.0, one),
    "2 * x": lambda one, _: jax.tree.map(lambda x: 2 * x, one),
    "x / 2": lambda one, _: jax.tree.map(lambda x: x / 2, one),
    "optax.incremental_update": lambda one, two: optax.incremental_update(one, two, 0.5),
    "optax.tree.add_scale": lambda one, two: optax.tree.add_scale(one, 0.5, two),
    "optax.tree.update_moment": lambda one, two: optax.tree.update_moment(one, two, 0.9, 1),
    "lax.scan": lambda one, two: jax.lax.scan(
        lambda total, _: (jax.tree.map(jnp.add, total, two), None), one, None, length=2
    ),
    "lax.fori_loop": lambda one, two: jax.lax.fori_loop(
        0, 2, lambda _, total: jax.tree.map(jnp.add, total, two), one
    ),
    "vmap and sum": lambda one, two: jax.tree.map(
        lambda x: jnp.sum(x, axis=0), jax.tree.map(lambda *x: jnp.stack(x), one, two)
    ),
}


@functools.cache
def two_gradients(name):
    interface = interfaces.ALL[name]("dense", "hashed")
    batch = interfaces.batch_of(interface)
    return [
        jax.jit(interface.gradients)(interface.model, batch, interfaces.labels_of())
        for _ in range(2)
    ]


@pytest.mark.parametrize("name", interfaces.ALL)
@pytest.mark.parametrize("idiom", SUMS)
def test_row_numbers_are_never_added(name, idiom):
    for function in (SUMS[idiom], jax.jit(SUMS[idiom])):
        with pytest.raises(TypeError, match=r"key<(row number: add|id: add|key: add)|data type"):
            function(*two_gradients(name))


# Skipping


@pytest.mark.slow_rows("linen")
@pytest.mark.parametrize("name", interfaces.ALL)
def test_a_step_is_skipped_or_made_for_all_parts_together(name):
    interface = interfaces.ALL[name](*ALL)

    def skipped(model, gradients):
        return model

    @jax.jit
    def step(model, batch, labels):
        gradients = interface.gradients(model, batch, labels)
        dense, rows = interface.parts(gradients)
        norm = optax.tree.norm(dense) + sum(map(rs.global_norm, rows))
        return jax.lax.cond(jnp.isfinite(norm), interface.stepped, skipped, model, gradients)

    def after(labels):
        return interface.contents(step(interface.model, interfaces.batch_of(interface), labels))

    before = interface.contents(interface.model)
    assert_same(after(interfaces.labels_of() * jnp.nan), before, rtol=0)
    assert_same(after(interfaces.labels_of()), stepped_on_all(name, *ALL))


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
    "MultiSteps, skip_large_updates": (
        optax.MultiSteps(
            SGD,
            1,
            should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=1.0),
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
NESTED = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("own", tx)),
    "masked": lambda tx: optax.masked(tx, lambda params: jax.tree.map(lambda _: True, params)),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.set_to_zero()}, lambda params: jax.tree.map(lambda _: "a", params)
    ),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.sgd(rate), tx)
    )(0.1),
    "selective_transform": lambda tx: optax.chain(
        optax.scale(1.0), optax.chain(tx, optax.identity())
    ),
    "another": lambda tx: optax.with_extra_args_support(optax.contrib.schedule_free(tx, 0.1)),
}


@pytest.mark.filterwarnings("ignore")  # lookahead warns that it saw only fast parameters
@pytest.mark.parametrize(
    ("name", "wrapper", "nested"),
    [
        *((name, wrapper, "alone") for name in ("nnx", "linen") for wrapper in DECIDING),
        *(("nnx", "apply_if_finite", nested) for nested in NESTED),
    ],
)
def test_what_decides_about_steps_is_refused_by_name(name, wrapper, nested):
    tx, way_out = DECIDING[wrapper]
    function = wrapper.partition(",")[0]
    with pytest.raises(
        ValueError, match=rf"tx has optax\.(experimental\.|contrib\.)?{function}, .*{way_out}"
    ):
        interfaces.ALL[name]("dense", tx=NESTED[nested](tx))


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_a_bare_multi_steps_names_the_way_out(name):
    with pytest.raises(
        TypeError, match=r"tx has optax\.MultiSteps, .*\(first \+ second\) / 2.* rs\.combine"
    ):
        interfaces.ALL[name]("dense", tx=optax.MultiSteps(SGD, 4))
    with pytest.raises(
        TypeError, match=r"bare optax.MultiSteps; give its .gradient_transformation\(\)"
    ):
        rs.from_optax(optax.MultiSteps(SGD, 4))


def test_what_is_put_into_a_train_state_later_is_refused_at_the_step():
    interface = interfaces.Linen("dense")
    tx = optax.apply_if_finite(SGD, 5)
    state = interface.model.replace(tx=tx, opt_state=tx.init(interface.model.params))
    with pytest.raises(ValueError, match=r"rs\.linen\.TrainState: tx has optax\.apply_if_finite"):
        state.apply_gradients(
            interface.gradients(state, interfaces.batch_of(interface), interfaces.labels_of())
        )


# What acts on dense parameters alone

DENSE_ONLY = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1e-3), SGD),
    "a schedule": optax.sgd(optax.linear_schedule(0.0, 0.1, 10)),
    "weight decay": optax.adamw(0.1, weight_decay=0.5),
    "masked": optax.masked(SGD, lambda params: jax.tree.map(lambda _: True, params)),
    "freeze": optax.freeze(True),
    "set_to_zero": optax.set_to_zero(),
    "zero_nans": optax.chain(optax.zero_nans(), SGD),
    "add_noise": optax.noisy_sgd(0.1, key=0),
    "ema": optax.chain(SGD, optax.ema(0.9)),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(0.1),
    "partition": optax.partition({"a": SGD}, lambda params: jax.tree.map(lambda _: "a", params)),
}


@pytest.mark.parametrize(
    ("name", "tx"), [*(("nnx", tx) for tx in DENSE_ONLY), ("linen", "clip_by_global_norm")]
)
def test_rows_are_stepped_by_the_rule_of_their_table_whatever_else_optax_does(name, tx):
    interface = interfaces.ALL[name]("dense", tx=DENSE_ONLY[tx])
    gradients = jax.jit(interface.gradients)(
        interface.model, interfaces.batch_of(interface), interfaces.labels_of()
    )
    _, tables = interface.contents(jax.jit(interface.stepped)(interface.model, gradients))
    assert_same(tables, stepped_on_all("core", "dense")[1])


# Wrappers as the rule of a table: every row decides for itself

BY_ROW = {
    "apply_if_finite": ([1.0, np.nan, 3.0, 1.0], [0.1, 0.1, 0.4, 0.5]),
    "MultiSteps": ([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.25]),
    "MultiSteps, skip_not_finite": ([1.0, np.nan, 3.0, 1.0], [0.1, 0.1, 0.4, 0.5]),
    "conditionally_mask": ([1.0, 2.0, 3.0, 4.0], [0.1, 0.1, 0.4, 0.4]),
    "apply_every": ([1.0, 2.0, 3.0, 4.0], [0.0, -3.0, -3.0, -10.0]),
}
"""Gradients of a row, and how far it has moved after each; `apply_every` adds the sum of two."""


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
