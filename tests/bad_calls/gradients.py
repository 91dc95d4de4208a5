"""Row gradients made by hand, and losses of `value_and_grad`."""

import dataclasses

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


def changed(**fields):
    return dataclasses.replace(row_gradients(), **fields)


def of_keys():
    return keyed().row_gradients({"who": np.array([5])}, {"who": np.ones((1, 4), np.float32)})


def changed_keys(rows=None, values=None):
    g = of_keys()
    (n,) = g.rows
    return keyed().apply(
        keyed_state(),
        dataclasses.replace(
            g, rows={n: g.rows[n] if rows is None else rows}, values={n: g.values[n] if values is None else values}
        ),
    )


def grad(loss, *extra, c=None, **o):
    return rs.value_and_grad(loss, collection(), **o)(jnp.ones(4), state(), batch(), *extra)


def loss(params, activations):
    return jnp.sum(params * activations["title"])


BAD = {
    "rows of floats": (
        lambda: applied(by_hand(rows=jnp.array([1.5]))),
        TypeError, "RowGradients: rows['word_user'] must be an array of",
    ),
    "rows of two axes": (
        lambda: applied(by_hand(rows=jnp.array([[1]]))),
        ValueError, "row gradients of stack 'word_user': rows (1, 1) and values",
    ),
    "more rows than values": (
        lambda: applied(by_hand(rows=jnp.array([1, 2]))),
        ValueError, "row gradients of stack 'word_user': rows (2,) and values",
    ),
    "rows as a list": (
        lambda: applied(by_hand(rows=[1])), ValueError, "row gradients of stack 'word_user': rows () and values (1,",
    ),
    "rows as text": (
        lambda: applied(by_hand(rows="1")),
        TypeError, "RowGradients: rows['word_user'] must be an array of", "got '1' (str)",
    ),
    "values of one axis": (
        lambda: applied(by_hand(values=jnp.ones(4))),
        ValueError, "row gradients of stack 'word_user': rows (1,) and values",
    ),
    "values of None": (
        lambda: applied(changed(values={"word_user": None})),
        TypeError, "RowGradients: values['word_user'] must be an array of", "got None (NoneType)",
    ),
    "rows without values": (
        lambda: applied(changed(values={})), ValueError, "row gradients of stack 'word_user': rows (6,) and values ()",
    ),
    "rows of a stack that is not there": (
        lambda: applied(changed(rows={"x": jnp.array([1])}, values={"x": jnp.ones((1,4))})),
        ValueError, "row gradients of stack 'word_user': rows () and values ()",
    ),
    "no rows": (
        lambda: applied(changed(rows=None)),
        TypeError, "RowGradients: rows must be a mapping (each an array of", "got None (NoneType)",
    ),
    "numbers of rows as a dict": (
        lambda: applied(by_hand(num_rows={"word_user": 14})),
        ValueError, "the row gradients do not belong to this collection: they",
    ),
    "rows of keys on one axis": (
        lambda: changed_keys(rows=jnp.array([1])),
        ValueError, "row gradients of stack 'client': rows (1,) and values (1,",
    ),
    "keys of which a half is missing": (
        lambda: changed_keys(rows=jnp.ones((1, 1), jnp.uint32)), ValueError, "stack 'client'", "rows (1, 1)",
    ),
    "rows of keys of another dim": (
        lambda: changed_keys(values=jnp.ones((1,3))),
        ValueError, "row gradients of stack 'client': rows (1, 3) and values (1,",
    ),
    "row gradients of two steps in one": (
        lambda: applied(jax.tree.map(lambda x: jnp.stack([x, x]), row_gradients())),
        ValueError, "row gradients of stack 'word_user': rows (2, 6) and values",
    ),
    "parameters of integers": (
        lambda: rs.value_and_grad(loss, collection())(jnp.ones(4, int), state(), batch()),
        TypeError, "value_and_grad: params must hold floats, got an array of",
    ),
    "a key among the parameters": (
        lambda: rs.value_and_grad(lambda p, a: a["title"].sum(), collection())({"k": KEY(0)}, state(), batch()),
        TypeError, "value_and_grad: params['k'] must hold floats, got an array",
    ),
}  # fmt: skip
