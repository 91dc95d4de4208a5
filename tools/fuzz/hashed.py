"""Target: keyed tables against dictionaries, with every policy of eviction and admission.

The two tables share a storage. Operations on one must not change the other.
"""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import rsembed as rs
from tests.storage.oracle import KeyedTable, Read, Steps
from tools.fuzz.machines import Machine, live

DIM = 2
SAMPLES = 6
CAPACITY = 8
LR = 0.5
KEYS = np.array(
    [
        0,
        1,
        2,
        3,
        2**31 - 1,
        2**32,
        2**32 + 1,
        5 * 2**33 + 1,
        2**40,
        2**62 + 2**33,
        2**63 - 2,
        2**63 - 1,
    ]
)
NAMES = ("user", "item")
POLICIES = (
    {"when_full": "evict", "eviction": "lru"},
    {"when_full": "evict", "eviction": "lfu"},
    {"when_full": "zero", "admission_count": 2},
)


def coarse(key, shape):
    """Initial values that are multiples of 1/16, so that sums of a few are exact in any order."""
    numbers = jnp.arange(shape[0] * shape[1], dtype=jnp.uint32).reshape(shape)
    bits = jax.random.key_data(key)[1] + numbers * 7
    return (bits % 32).astype(jnp.float32) / 16


def by_entry(rule, row, slots, gradient, number):
    row -= LR * gradient


@functools.cache
def collection_of(policy):
    """A collection, its compiled step, update and lookup, and the initial values of keys."""
    num_rows = 2 * len(KEYS)
    if "eviction" in POLICIES[policy]:
        num_rows = CAPACITY
    features = []
    for name in NAMES:
        table = rs.TableSpec(
            name=name,
            vocabulary_size=num_rows,
            embedding_dim=DIM,
            optimizer=rs.optimizers.SGD(LR),
            initializer=coarse,
            storage=rs.Hashed(**POLICIES[policy]),
        )
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    collection = rs.EmbeddingCollection(features)

    @jax.jit
    def step(state, batch):
        read, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(jax.tree.map(jnp.ones_like, read))), read

    update = jax.jit(collection.update)
    lookup = jax.jit(collection.lookup)
    if "admission_count" in POLICIES[policy]:
        # Keys that are not admitted read zeros. Initial values do not depend on the policy.
        return collection, step, update, lookup, collection_of(0)[4]
    # With more new keys than rows in a lookup, some keys would read zeros.
    state = collection.init(jax.random.key(0))
    initial: dict[str, dict[int, np.ndarray]] = {name: {} for name in NAMES}
    for first in range(0, len(KEYS), CAPACITY):
        keys = KEYS[first : first + CAPACITY]
        ahead = collection.lookup_vjp(state, dict.fromkeys(NAMES, keys))[0]
        for name, rows in ahead.items():
            initial[name] |= zip(keys.tolist(), np.float64(rows), strict=True)
    return collection, step, update, lookup, initial


class Hashed(Machine):
    """Steps, which admit and evict keys, lookups, and dumps that are restored."""

    @initialize(policy=st.integers(0, len(POLICIES) - 1))
    def begin(self, policy):
        self.collection, self.step, self.update, self.lookup, initial = collection_of(policy)
        options = {name: value for name, value in POLICIES[policy].items() if name != "when_full"}
        capacity = {"capacity": CAPACITY} if "eviction" in options else {}
        sgd = Steps((rs.optimizers.SGD(LR),), (by_entry,))
        self.state = self.collection.init(jax.random.key(0))
        self.oracles = {
            name: KeyedTable(initial[name], "sum", sgd, **options, **capacity) for name in NAMES
        }
        self.dumped = None

    def reads_of(self, seed):
        draw = np.random.default_rng(seed)
        reads = {}
        for name in NAMES:
            ids = draw.choice(draw.permutation(KEYS)[:CAPACITY], (SAMPLES, 2))
            reads[name] = Read(np.where(draw.random(ids.shape) < 0.2, -1, ids), None)
        return reads, self.collection.prepare({name: read.ids for name, read in reads.items()})

    def expect(self, actual, wanted):
        np.testing.assert_array_equal(np.asarray(actual, np.float64), wanted)

    @rule(seed=st.integers(0, 2**16), has_pullback=st.booleans())
    def train(self, seed, has_pullback):
        reads, batch = self.reads_of(seed)
        ones = dict.fromkeys(NAMES, np.ones((SAMPLES, DIM), np.float32))
        if has_pullback:
            ahead = {}
            for name, read in reads.items():
                ahead[name] = self.oracles[name].lookup_ahead({name: read})[name]
            self.state, outputs = self.step(self.state, batch)
            for name in NAMES:
                self.expect(outputs[name], ahead[name])
        else:
            self.state = self.update(self.state, batch, ones)
        for name, read in reads.items():
            self.oracles[name].update({name: read}, {name: ones[name]})

    @rule(seed=st.integers(0, 2**16))
    def look_up(self, seed):
        reads, batch = self.reads_of(seed)
        outputs = self.lookup(self.state, batch)
        for name, read in reads.items():
            self.expect(outputs[name], self.oracles[name].lookup({name: read})[name])

    @invariant()
    def holds_what_it_should(self):
        tables = self.collection.tables(self.state)
        counts = self.collection.counts(self.state)
        for name, oracle in self.oracles.items():
            table = tables[name]
            keys = sorted(oracle.rows)
            assert table["keys"].tolist() == keys
            assert table["last_step"].tolist() == [oracle.last_step[key] for key in keys]
            assert table["count"].tolist() == [oracle.occurrences[key] for key in keys]
            values = np.reshape([oracle.rows[key][0] for key in keys], (-1, DIM))
            self.expect(table["values"], values)
            assert counts[name]["rows"].sum() == len(keys) and counts[name]["failed"].sum() == 0

    @rule()
    def dump(self):
        self.dumped = self.state, copy.deepcopy(self.oracles), self.collection.tables(self.state)

    @precondition(lambda self: self.dumped is not None)
    @rule(into_fresh=st.booleans())
    def restore(self, into_fresh):
        state, oracles, tables = self.dumped
        if into_fresh:
            # The order of rows in a new state is another one.
            fresh = self.collection.init(jax.random.key(0))
            state = self.collection.with_tables(fresh, tables)._replace(step=state.step)
        self.state = state
        self.oracles = copy.deepcopy(oracles)

    @precondition(lambda self: self.dumped is not None)
    @rule(name=st.sampled_from(NAMES))
    def restore_one(self, name):
        """Restores one table, and leaves the other as it is."""
        state, oracles, tables = self.dumped
        if int(state.step) != int(self.state.step):
            return
        fresh = self.collection.init(jax.random.key(0))
        tables_now = self.collection.tables(self.state) | {name: tables[name]}
        self.state = self.collection.with_tables(fresh, tables_now)._replace(step=state.step)
        self.oracles[name] = copy.deepcopy(oracles[name])


def run(seed: int) -> int:
    return live(Hashed, seed)
