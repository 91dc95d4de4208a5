"""Row gradients made by hand, and losses of `value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from tests.bad_calls.world import (
    KEY,
    batch,
    collection,
    keyed,
    keyed_state,
    row_gradients,
    state,
)


def by_hand(rows=None, values=None, num_rows=(("word_user", 14),), **o):
    return rs.RowGradients(
        {"word_user": jnp.array([1]) if rows is None else rows},
        {"word_user": jnp.ones((1, 4)) if values is None else values},
        num_rows,
        **o,
    )


def applied(g):
    return jax.block_until_ready(collection().apply(state(), g))


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
    return rs.value_and_grad(loss, collection(), **o)(jnp.ones(4), state(), batch(), *extra)


def L(p, a):
    return jnp.sum(p * a["title"]), None


BAD = {
    "rows float": (
        lambda: applied(by_hand(rows=jnp.array([1.5]))),
        TypeError, "RowGradients: rows['word_user'] must be an array of",
    ),
    "rows 2 axes": (
        lambda: applied(by_hand(rows=jnp.array([[1]]))),
        ValueError, "row gradients of stack 'word_user': rows (1, 1) and values",
    ),
    "rows more than values": (
        lambda: applied(by_hand(rows=jnp.array([1, 2]))),
        ValueError, "row gradients of stack 'word_user': rows (2,) and values",
    ),
    "rows list": (
        lambda: applied(by_hand(rows=[1])), ValueError, "row gradients of stack 'word_user': rows () and values (1,",
    ),
    "rows text": (
        lambda: applied(by_hand(rows="1")),
        TypeError, "RowGradients: rows['word_user'] must be an array of", "got '1' (str)",
    ),
    "values one axis": (
        lambda: applied(by_hand(values=jnp.ones(4))),
        ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "values None": (
        lambda: applied(rgs(values={"word_user": None})),
        TypeError, "RowGradients: values['word_user'] must be an array of", "got None (NoneType)",
    ),
    "values missing": (
        lambda: applied(rgs(values={})), ValueError, "row gradients of stack 'word_user': rows (6,) and values ()",
    ),
    "rows of other name": (
        lambda: applied(rgs(rows={"x": jnp.array([1])}, values={"x": jnp.ones((1,4))})),
        ValueError, "row gradients of stack 'word_user': rows () and values ()",
    ),
    "rows None": (
        lambda: applied(rgs(rows=None)),
        TypeError, "RowGradients: rows must be a mapping (each an array of", "got None (NoneType)",
    ),
    "num_rows dict": (
        lambda: applied(by_hand(num_rows={"word_user": 14})),
        ValueError, "the row gradients do not belong to this collection: they",
    ),
    "keyed rows one axis": (
        lambda: krep(rows=jnp.array([1])), ValueError, "row gradients of stack 'client': rows (1,) and values (1,",
    ),
    "keyed values other dim": (
        lambda: krep(values=jnp.ones((1,3))), ValueError, "row gradients of stack 'client': rows (1, 3) and values (1,",
    ),
    "stacked rg": (
        lambda: applied(jax.tree.map(lambda x: jnp.stack([x, x]), row_gradients())),
        ValueError, "row gradients of stack 'word_user': rows (2, 6) and values",
    ),
    "params int": (
        lambda: rs.value_and_grad(L, collection())(jnp.ones(4, int), state(), batch()),
        TypeError, "value_and_grad: params must hold floats, got an array of",
    ),
    "params key": (
        lambda: rs.value_and_grad(lambda p, a: (a["title"].sum(), None), collection())({"k": KEY(0)}, state(), batch()),
        TypeError, "value_and_grad: params['k'] must hold floats, got an array",
    ),
}  # fmt: skip
