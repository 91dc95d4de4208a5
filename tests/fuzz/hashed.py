"""Target: a table of keys of 64 bits against a dictionary, with every way to give rows up, and to wait for one."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import rsembed as rs
from tests.fuzz.machines import Machine, live
from tests.homes.oracle import KeyedTable, Read, Steps

DIM, SAMPLES, CAPACITY, LR = 2, 6, 8, 0.5
KEYS = np.array([0, 1, 2, 3, 2**31 - 1, 2**32, 2**32 + 1, 5 * 2**33 + 1, 2**40, 2**62 + 2**33, 2**63 - 2, 2**63 - 1])
POLICIES = (
    *({"when_full": "evict", "eviction": eviction} for eviction in ("lru", "lfu", "age", "l2")),
    {"when_full": "zero", "admission_count": 2},
)


def coarse(key, shape):
    """Multiples of 1/16, so that sums of a few are exact in any order."""
    bits = jax.random.key_data(key)[1] + jnp.arange(shape[0] * shape[1], dtype=jnp.uint32).reshape(shape) * 7
    return (bits % 32).astype(jnp.float32) / 16


def by_entry(rule, row, slots, gradient, number):
    row -= LR * gradient


@functools.cache
def collection_of(policy):
    """With its compiled step and lookup, and what every key starts from."""
    table = rs.TableSpec(
        name="user",
        vocabulary_size=CAPACITY if "eviction" in POLICIES[policy] else 2 * len(KEYS),
        embedding_dim=DIM,
        optimizer=rs.SGDOptimizerSpec(LR),
        initializer=coarse,
        storage=rs.Hashed(**POLICIES[policy]),
    )
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])

    @jax.jit
    def step(state, batch):
        read, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(jax.tree.map(jnp.ones_like, read))), read

    update, lookup = jax.jit(collection.update), jax.jit(collection.lookup)
    ahead = collection.lookup_vjp(collection.init(jax.random.key(0)), {"f": KEYS})[0]["f"]
    if "admission_count" in POLICIES[policy]:  # what is not admitted reads zeros
        ahead = collection_of(0)[4]
    initial = ahead if isinstance(ahead, dict) else dict(zip(KEYS.tolist(), np.float64(ahead), strict=True))
    return collection, step, update, lookup, initial


class Hashed(Machine):
    """Keys that come, go and come back; rows that are dumped and restored."""

    @initialize(policy=st.integers(0, len(POLICIES) - 1))
    def begin(self, policy):
        self.collection, self.step, self.update, self.lookup, initial = collection_of(policy)
        options = {name: value for name, value in POLICIES[policy].items() if name != "when_full"}
        capacity = {"capacity": CAPACITY} if "eviction" in options else {}
        sgd = Steps((rs.SGDOptimizerSpec(LR),), (by_entry,))
        self.state = self.collection.init(jax.random.key(0))
        self.oracle = KeyedTable(initial, "sum", sgd, **options, **capacity)
        self.dumped = None

    def read_of(self, seed):
        draw = np.random.default_rng(seed)
        ids = draw.choice(draw.permutation(KEYS)[:CAPACITY], (SAMPLES, 2))
        return Read(np.where(draw.random(ids.shape) < 0.2, -1, ids), None)

    def expect(self, found, wanted):
        np.testing.assert_array_equal(np.asarray(found, np.float64), wanted)

    @rule(seed=st.integers(0, 2**16), has_pullback=st.booleans())
    def train(self, seed, has_pullback):
        read = self.read_of(seed)
        batch, ones = self.collection.prepare({"f": read.ids}), {"f": np.ones((SAMPLES, DIM), np.float32)}
        if has_pullback:
            ahead = self.oracle.lookup_ahead({"f": read})["f"]
            self.state, found = self.step(self.state, batch)
            self.expect(found["f"], ahead)
        else:
            self.state = self.update(self.state, batch, ones)
        self.oracle.update({"f": read}, ones)

    @rule(seed=st.integers(0, 2**16))
    def look_up(self, seed):
        read = self.read_of(seed)
        found = self.lookup(self.state, self.collection.prepare({"f": read.ids}))["f"]
        self.expect(found, self.oracle.lookup({"f": read})["f"])

    @invariant()
    def holds_what_it_should(self):
        table, oracle = self.collection.tables(self.state)["user"], self.oracle
        keys = sorted(oracle.rows)
        assert table["keys"].tolist() == keys
        assert table["last_step"].tolist() == [oracle.last_step[key] for key in keys]
        assert table["count"].tolist() == [oracle.occurrences[key] for key in keys]
        self.expect(table["values"], np.reshape([oracle.rows[key][0] for key in keys], (-1, DIM)))
        counts = self.collection.counts(self.state)["user"]
        assert counts["rows"].sum() == len(keys) and counts["failed"].sum() == 0

    @rule()
    def dump(self):
        self.dumped = self.state, copy.deepcopy(self.oracle), self.collection.tables(self.state)["user"]

    @precondition(lambda self: self.dumped is not None)
    @rule(into_fresh=st.booleans())
    def restore(self, into_fresh):
        state, oracle, table = self.dumped
        if into_fresh:  # where rows lie in another order
            state = self.collection.init(jax.random.key(0))._replace(step=state.step)
            state = self.collection.with_tables(state, {"user": table})
        self.state, self.oracle = state, copy.deepcopy(oracle)

    @precondition(lambda self: self.dumped is not None and self.dumped[1].number <= self.oracle.number)
    @rule()
    def restore_with_changes(self):
        """What changed since the dump, on top of it, is what there is now: also if the life in between began anew."""
        since = int(self.dumped[0].step)
        changes = self.collection.tables(self.state, since=since)["user"]
        fresh = self.collection.init(jax.random.key(0))._replace(step=self.state.step)
        base = self.collection.with_tables(fresh, {"user": self.dumped[2]})
        self.state = self.collection.with_tables(base, {"user": changes})


def run(seed: int) -> int:
    return live(Hashed, seed)
