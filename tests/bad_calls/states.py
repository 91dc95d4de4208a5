"""Bad states of collections, and what steps are given beside them."""

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
    near,
    near_state,
    other,
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


def serving():
    return S()._replace(slots={})


def adam():
    c = rs.EmbeddingCollection([feature(table_spec=table(optimizer=rs.AdamOptimizerSpec(0.1)))])
    return c


def serve_adam():
    c = adam()
    s = c.init(KEY(0))
    return c, s._replace(slots={})


b1 = {"title": [[1]]}
g1 = {"title": np.ones((1, 4), np.float32)}


def ka():
    return keyed(), keyed().init(KEY(0))


def ev(*a, **k):
    return keyed().evict(keyed().init(KEY(0)), *a, **k)


def wt(**t):
    return C().with_tables(S(), t)


def kt(**c):
    return keyed().with_tables(
        keyed_state(), {"client": {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | c}
    )


def donated():
    c = other()
    s = c.init(KEY(0))
    jax.jit(lambda s: c.update(s, b1, g1), donate_argnums=0)(s)
    return c, s


def nr(**b):
    return near().lookup(near_state(), {"what": [[1]]} | b)


def stale():
    n = near()
    s = n.init(KEY(0))
    n.update(s, {"what": [[1]]}, {"what": np.ones((1, 4), np.float32)})
    return n.update(s, {"what": [[2]]}, {"what": np.ones((1, 4), np.float32)})


BAD = {
    "update serving": (
        lambda: C().update(serving(), batch(), gradients()),
        ValueError, "the state does not belong to this collection: slots are {},",
    ),
    "update serving adam": (
        lambda: serve_adam()[0].update(serve_adam()[1], b1, g1),
        ValueError, "the state does not belong to this collection: slots are {},",
    ),
    "prefetch serving near": (
        lambda: near().prefetch(near_state()._replace(slots={}), {"what": [[1]]}),
        ValueError, "table 'item' is on the host, where optimizer state moves",
    ),
    "state tables list": (
        lambda: C().lookup(S()._replace(tables=[jnp.ones((14,4))]), batch()),
        ValueError, "the state does not belong to this collection: tables are",
    ),
    "state slots None": (
        lambda: C().update(S()._replace(slots=None), batch(), gradients()),
        ValueError, "the state does not belong to this collection: slots are",
    ),
    "state step None": (
        lambda: C().update(S()._replace(step=None), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state step text": (
        lambda: C().update(S()._replace(step="3"), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state step float": (
        lambda: C().update(S()._replace(step=jnp.ones(())), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state step vector": (
        lambda: C().update(S()._replace(step=jnp.zeros(2, jnp.int32)), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state tuple": (
        lambda: C().lookup(tuple(S()), batch()),
        TypeError, "the state, which collection.init makes, must be of type", "got a value of type tuple",
    ),
    "donated lookup": (
        lambda: donated()[0].lookup(donated()[1], b1),
        RuntimeError, "the state has lost its tables to a step that took its",
    ),
    "donated counts": (
        lambda: donated()[0].counts(donated()[1]),
        RuntimeError, "the state has lost its tables to a step that took its",
    ),
    "init rngs": (
        lambda: C().init(__import__("flax").nnx.Rngs(0)),
        TypeError, "init: key must be a PRNG key, such as jax.random.key(0),", "got a value of type Rngs",
    ),
    "lookup_vjp None": (
        lambda: C().lookup_vjp(None, batch()),
        TypeError, "the state, which collection.init makes, must be of type", "got None (NoneType)",
    ),
    "pullback activations of loss": (
        lambda: C().lookup_vjp(S(), batch())[1](gradients(title=None)),
        TypeError, "feature 'title': the activation gradient must be an array", "got None (NoneType)",
    ),
    "pullback traced int": (
        lambda: jax.jit(lambda g: C().lookup_vjp(S(), batch())[1](gradients(title=g)))(jnp.ones((2,4), int)),
        TypeError, "feature 'title': the activation gradient must be an array",
    ),
    "update grads None": (
        lambda: C().update(S(), batch(), None),
        TypeError, "the activation gradients, with one entry for each of", "got None (NoneType)",
    ),
    "update object": (
        lambda: C().update(S(), batch(), gradients(title=np.full((2,4), None))),
        TypeError, "feature 'title': the activation gradient must be an array",
    ),
    "with_tables text": (
        lambda: wt(word="x"), TypeError, "table 'word': its values must be an array of numbers, got", "got 'x' (str)",
    ),
    "with_tables complex": (
        lambda: wt(word=np.ones((9,4), complex)),
        TypeError, "table 'word': its values must be an array of numbers, got",
    ),
    "with_tables stack name": (
        lambda: wt(word_user=np.ones((14,4))), ValueError, "unknown table 'word_user' (did you mean 'word'?); the",
    ),
    "kt keys text": (
        lambda: kt(keys=["a","b"]),
        TypeError, "table 'client': its keys must be an array of numbers, got", "got ['a', 'b'] (list)",
    ),
    "kt values None": (
        lambda: kt(values=None),
        TypeError, "table 'client': its values must be an array of numbers, got", "got None (NoneType)",
    ),
    "kt slot unknown": (
        lambda: kt(slot_momentum=np.ones((2,4))), ValueError, "table 'client': cannot import ['slot_momentum']; it has",
    ),
    "evict two reasons": (
        lambda: ev("client", keep=1, unused_for=1),
        ValueError, "evict from table 'client': give one of keep, unused_for,",
    ),
    "evict float": (
        lambda: ev("client", keep=1.5),
        TypeError, "evict from table 'client': keep must be an integer, got 1.5", "got 1.5 (float)",
    ),
    "evict norm text": (
        lambda: ev("client", norm_below="1"),
        TypeError, "evict from table 'client': norm_below must be a number, got", "got '1' (str)",
    ),
    "evict other state": (
        lambda: keyed().evict(S(), "client", keep=1),
        ValueError, "the state does not belong to this collection: client is",
    ),
    "counts jit": (
        lambda: jax.jit(keyed().counts)(keyed_state()),
        RuntimeError, "rows by key, and counts, come to the host; read them",
    ),
    "tables jit keyed": (
        lambda: jax.jit(keyed().tables)(keyed_state()),
        RuntimeError, "rows by key, and counts, come to the host; read them",
    ),
    "slots jit keyed": (
        lambda: jax.jit(keyed().slots)(keyed_state()),
        RuntimeError, "rows by key, and counts, come to the host; read them",
    ),
    "tables jit near": (
        lambda: jax.jit(near().tables)(near_state()),
        RuntimeError, "rows by key, and counts, come to the host; read them",
    ),
    "prefetch outside": (
        lambda: near().prefetch(near_state(), {"what": [[9]]}),
        ValueError, "feature 'what': id 9 in sample 0 is outside table 'item'",
    ),
}  # fmt: skip
