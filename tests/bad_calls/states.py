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


def serving():
    return state()._replace(slots={})


def adam():
    c = rs.EmbeddingCollection([feature(table_spec=table(optimizer=rs.AdamOptimizerSpec(0.1)))])
    return c


def serve_adam():
    c = adam()
    s = c.init(KEY(0))
    return c, s._replace(slots={})


b1 = {"title": [[1]]}
g1 = {"title": np.ones((1, 4), np.float32)}


def ev(*a, **k):
    return keyed().evict(keyed().init(KEY(0)), *a, **k)


def wt(**t):
    return collection().with_tables(state(), t)


def kt(**c):
    return keyed().with_tables(
        keyed_state(), {"client": {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | c}
    )


def donated():
    c = other()
    s = c.init(KEY(0))
    jax.jit(lambda s: c.update(s, b1, g1), donate_argnums=0)(s)
    return c, s


BAD = {
    "update serving adam": (
        lambda: serve_adam()[0].update(serve_adam()[1], b1, g1),
        ValueError, "the state does not belong to this collection: slots are {},",
    ),
    "prefetch serving near": (
        lambda: near().prefetch(near_state()._replace(slots={}), {"what": [[1]]}),
        ValueError, "table 'item' is on the host, where optimizer state moves",
    ),
    "state tables list": (
        lambda: collection().lookup(state()._replace(tables=[jnp.ones((14,4))]), batch()),
        ValueError, "the state does not belong to this collection: tables are",
    ),
    "state step None": (
        lambda: collection().update(state()._replace(step=None), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state step text": (
        lambda: collection().update(state()._replace(step="3"), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state step float": (
        lambda: collection().update(state()._replace(step=jnp.ones(())), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "state step vector": (
        lambda: collection().update(state()._replace(step=jnp.zeros(2, jnp.int32)), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "donated lookup": (
        lambda: donated()[0].lookup(donated()[1], b1),
        RuntimeError, "the state has lost its tables to a step that took its",
    ),
    "with_tables text": (
        lambda: wt(word="x"), TypeError, "table 'word': its values must be an array of numbers, got", "got 'x' (str)",
    ),
    "with_tables stack name": (
        lambda: wt(word_user=np.ones((14,4))), ValueError, "unknown table 'word_user' (did you mean 'word'?); the",
    ),
    "kt keys text": (
        lambda: kt(keys=["a","b"]),
        TypeError, "table 'client': its keys must be an array of numbers, got", "got ['a', 'b'] (list)",
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
        lambda: keyed().evict(state(), "client", keep=1),
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
    "prefetch outside": (
        lambda: near().prefetch(near_state(), {"what": [[9]]}),
        ValueError, "feature 'what': id 9 in sample 0 is outside table 'item'",
    ),
}  # fmt: skip
