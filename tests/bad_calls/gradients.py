"""Row gradients made by hand, and losses of `value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from tests.bad_calls.world import (
    KEY,
    batch,
    collection,
    feature,
    gradients,
    keyed,
    keyed_state,
    row_gradients,
    state,
    table,
)

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)
NAN = float("nan")


def one(**o):
    return rs.EmbeddingCollection([feature()], **o)


def plan(**o):
    return rs.plan_stacking([feature("a", table("s")), feature("b", table("t"))], **o)


def stored(storage, rows=9, **fields):
    return rs.EmbeddingCollection([feature(table_spec=table(storage=storage, vocabulary_size=rows, **fields))])


C, S = collection, state
lens = gradients


def by_hand(rows=None, values=None, num_rows=(("word_user", 14),), **o):
    return rs.RowGradients(
        {"word_user": jnp.array([1]) if rows is None else rows},
        {"word_user": jnp.ones((1, 4)) if values is None else values},
        num_rows,
        **o,
    )


def ap(g):
    return jax.block_until_ready(C().apply(S(), g))


def rgs(**c):
    return __import__("dataclasses").replace(row_gradients(), **c)


def keyed_rg():
    return keyed().row_gradients({"who": np.array([5])}, {"who": np.ones((1, 4), np.float32)})


def krep(rows=None, values=None):
    g = keyed_rg()
    (n,) = g.rows
    return keyed().apply(
        keyed_state(),
        __import__("dataclasses").replace(
            g, rows={n: g.rows[n] if rows is None else rows}, values={n: g.values[n] if values is None else values}
        ),
    )


def grad(loss, *extra, c=None, **o):
    return rs.value_and_grad(loss, C(), **o)(jnp.ones(4), S(), batch(), *extra)


def L(p, a):
    return jnp.sum(p * a["title"]), None


BAD = {
    "rows float": (
        lambda: ap(by_hand(rows=jnp.array([1.5]))), TypeError, "RowGradients: rows['word_user'] must be an array of",
    ),
    "rows 2 axes": (
        lambda: ap(by_hand(rows=jnp.array([[1]]))),
        ValueError, "row gradients of stack 'word_user': rows (1, 1) and values",
    ),
    "rows more than values": (
        lambda: ap(by_hand(rows=jnp.array([1, 2]))),
        ValueError, "row gradients of stack 'word_user': rows (2,) and values",
    ),
    "rows fewer than values": (
        lambda: ap(by_hand(values=jnp.ones((2, 4)))),
        ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "rows outside": (
        lambda: ap(by_hand(rows=jnp.array([14]))),
        ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "rows negative": (
        lambda: ap(by_hand(rows=jnp.array([-1]))),
        ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "rows twice": (
        lambda: ap(by_hand(rows=jnp.array([1,1]), values=jnp.ones((2,4)))),
        ValueError, "row gradients of stack 'word_user': rows (2,) and values",
    ),
    "rows descending": (
        lambda: ap(by_hand(rows=jnp.array([2,1]), values=jnp.ones((2,4)))),
        ValueError, "row gradients of stack 'word_user': rows (2,) and values",
    ),
    "rows list": (
        lambda: ap(by_hand(rows=[1])), ValueError, "row gradients of stack 'word_user': rows () and values (1,",
    ),
    "rows text": (
        lambda: ap(by_hand(rows="1")),
        TypeError, "RowGradients: rows['word_user'] must be an array of", "got '1' (str)",
    ),
    "rows None in dict": (
        lambda: ap(rgs(rows={"word_user": None})),
        TypeError, "RowGradients: rows['word_user'] must be an array of", "got None (NoneType)",
    ),
    "values other dim": (
        lambda: ap(by_hand(values=jnp.ones((1, 3)))),
        ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "values one axis": (
        lambda: ap(by_hand(values=jnp.ones(4))), ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "values None": (
        lambda: ap(rgs(values={"word_user": None})),
        TypeError, "RowGradients: values['word_user'] must be an array of", "got None (NoneType)",
    ),
    "values missing": (
        lambda: ap(rgs(values={})), ValueError, "row gradients of stack 'word_user': rows (6,) and values ()",
    ),
    "rows missing": (
        lambda: ap(rgs(rows={})), ValueError, "row gradients of stack 'word_user': rows () and values (6,",
    ),
    "rows of other name": (
        lambda: ap(rgs(rows={"x": jnp.array([1])}, values={"x": jnp.ones((1,4))})),
        ValueError, "row gradients of stack 'word_user': rows () and values ()",
    ),
    "rows None": (
        lambda: ap(rgs(rows=None)),
        TypeError, "RowGradients: rows must be a mapping (each an array of", "got None (NoneType)",
    ),
    "num_rows dict": (
        lambda: ap(by_hand(num_rows={"word_user": 14})),
        ValueError, "the row gradients do not belong to this collection: they",
    ),
    "keyed rows one axis": (
        lambda: krep(rows=jnp.array([1])), ValueError, "row gradients of stack 'client': rows (1,) and values (1,",
    ),
    "keyed values other dim": (
        lambda: krep(values=jnp.ones((1,3))), ValueError, "row gradients of stack 'client': rows (1, 3) and values (1,",
    ),
    "keyed values more": (
        lambda: krep(values=jnp.ones((7,4))), ValueError, "row gradients of stack 'client': rows (1, 3) and values (7,",
    ),
    "combine hand lens": (
        lambda: rs.combine(by_hand(), by_hand(rows=jnp.array([1,2]))),
        ValueError, "row gradients of stack 'word_user': rows (2,) and values",
    ),
    "combine missing stack": (
        lambda: rs.combine(row_gradients(), rgs(values={})),
        ValueError, "row gradients of stack 'word_user': rows (6,) and values ()",
    ),
    "stacked rg": (
        lambda: ap(jax.tree.map(lambda x: jnp.stack([x, x]), row_gradients())),
        ValueError, "row gradients of stack 'word_user': rows (2, 6) and values",
    ),
    "averaged rg": (
        lambda: ap(jax.tree.map(lambda x: jnp.mean(x, axis=0), row_gradients())),
        TypeError, "RowGradients: rows['word_user'] must be an array of",
    ),
    "halved rg": (
        lambda: ap(jax.tree.map(lambda x: x * 0.5, row_gradients())),
        TypeError, "RowGradients: rows['word_user'] must be an array of",
    ),
    "loss returns None": (
        lambda: grad(lambda p, a: None, has_aux=False),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got", "got None (NoneType); take its mean",
    ),
    "loss returns text": (
        lambda: grad(lambda p, a: "x", has_aux=False),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got", "got 'x' (str); take its mean",
    ),
    "loss returns python int": (
        lambda: grad(lambda p, a: 1, has_aux=False),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got 1", "got 1 (int); take its mean",
    ),
    "loss returns complex": (
        lambda: grad(lambda p, a: jnp.sum(a["title"]) * 1j, has_aux=False),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got an",
    ),
    "loss returns dict": (
        lambda: grad(lambda p, a: {"loss": jnp.sum(a["title"])}, has_aux=False),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got",
    ),
    "loss returns pair without aux": (
        lambda: grad(L, has_aux=False), TypeError, "value_and_grad: the loss must be a scalar of floats, got",
    ),
    "params int": (
        lambda: rs.value_and_grad(L, C())(jnp.ones(4, int), S(), batch()),
        TypeError, "value_and_grad: params must hold floats, got an array of",
    ),
    "params text": (
        lambda: rs.value_and_grad(lambda p, a: (jnp.sum(a["title"]), None), C())("w", S(), batch()),
        TypeError, "value_and_grad: params must hold floats, got 'w' (str);",
    ),
    "params key": (
        lambda: rs.value_and_grad(lambda p, a: (jnp.sum(a["title"]), None), C())({"k": KEY(0)}, S(), batch()),
        TypeError, "value_and_grad: params['k'] must hold floats, got an array",
    ),
}  # fmt: skip
