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


def adam_without_slots():
    made = rs.EmbeddingCollection([feature(table_spec=table(optimizer=rs.optimizers.Adam(0.1)))])
    return made, made.init(KEY(0))._replace(slots={})


BATCH = {"title": [[1]]}
GRADIENTS = {"title": np.ones((1, 4), np.float32)}


def evicted(**reason):
    return keyed().evict(keyed().init(KEY(0)), "client", **reason)


def with_tables(**tables):
    return collection().with_tables(state(), tables)


def with_keys(**arrays):
    return keyed().with_tables(
        keyed_state(), {"client": {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | arrays}
    )


def donated():
    state = other().init(KEY(0))
    jax.jit(lambda state: other().update(state, BATCH, GRADIENTS), donate_argnums=0)(state)
    return state


BAD = {
    "a step without slots": (
        lambda: adam_without_slots()[0].update(adam_without_slots()[1], BATCH, GRADIENTS),
        ValueError, "the state does not belong to this collection: slots are {},",
    ),
    "a prefetch without slots": (
        lambda: near().prefetch(near_state()._replace(slots={}), {"what": [[1]]}),
        ValueError, "table 'item' is on the host, where optimizer state moves",
    ),
    "tables as a list": (
        lambda: collection().lookup(state()._replace(tables=[jnp.ones((14,4))]), batch()),
        ValueError, "the state does not belong to this collection: tables are",
    ),
    "a step number of None": (
        lambda: collection().update(state()._replace(step=None), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "a step number as text": (
        lambda: collection().update(state()._replace(step="3"), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "a step number of floats": (
        lambda: collection().update(state()._replace(step=jnp.ones(())), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "several step numbers": (
        lambda: collection().update(state()._replace(step=jnp.zeros(2, jnp.int32)), batch(), gradients()),
        ValueError, "the state does not belong to this collection: step are",
    ),
    "a state that was given away": (
        lambda: other().lookup(donated(), BATCH),
        RuntimeError, "the state has lost its tables to a step that took its",
    ),
    "a table as text": (
        lambda: with_tables(word="x"),
        TypeError, "table 'word': its values must be an array of numbers, got", "got 'x' (str)",
    ),
    "a stack by name in place of its tables": (
        lambda: with_tables(word_user=np.ones((14,4))),
        ValueError, "unknown table 'word_user' (did you mean 'word'?); the",
    ),
    "keys of rows as text": (
        lambda: with_keys(keys=["a","b"]),
        TypeError, "table 'client': its keys must be an array of numbers, got", "got ['a', 'b'] (list)",
    ),
    "a slot that the rule has not": (
        lambda: with_keys(slot_momentum=np.ones((2,4))),
        ValueError, "table 'client': cannot import ['slot_momentum']; it has",
    ),
    "an eviction without a reason": (
        lambda: evicted(),
        ValueError, "evict from table 'client': give one or more of keep, unused_for,",
    ),
    "an eviction that keeps half a row": (
        lambda: evicted(keep=1.5),
        TypeError, "evict from table 'client': keep must be an integer, got 1.5", "got 1.5 (float)",
    ),
    "an eviction by a norm as text": (
        lambda: evicted(norm_below="1"),
        TypeError, "evict from table 'client': norm_below must be a number, got", "got '1' (str)",
    ),
    "an eviction from another state": (
        lambda: keyed().evict(state(), "client", keep=1),
        ValueError, "the state does not belong to this collection: client is",
    ),
    "counts inside jit": (
        lambda: jax.jit(keyed().counts)(keyed_state()),
        RuntimeError, "rows by key, and counts, come to the host; read them",
    ),
    "tables of keys inside jit": (
        lambda: jax.jit(keyed().tables)(keyed_state()),
        RuntimeError, "rows by key, and counts, come to the host; read them",
    ),
    "a prefetch of an id outside": (
        lambda: near().prefetch(near_state(), {"what": [[9]]}),
        ValueError, "feature 'what': id 9 in sample 0 is outside table 'item'",
    ),
}  # fmt: skip
