"""Target: three tables that are trained, saved, loaded on other devices, and replaced.

Expected values are computed by arrays and a dictionary.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from jax.sharding import Mesh

import rsembed as rs
from rsembed import checkpoint
from tests.storage.oracle import DenseTable, KeyedTable, Read, Steps
from tools.fuzz.hashed import KEYS, LR, by_entry, coarse, collection_of
from tools.fuzz.machines import Machine, live

DIM = 2
SAMPLES = 12
WIDTH = 2
ROWS = {"word": 23, "item": 300, "user": 4 * len(KEYS)}
SGD = rs.optimizers.SGD(LR)
NUM_NEAR = 24
# The items of a batch are drawn from 12 rows, one for each remainder of a division by 12. Each of
# up to 4 devices owns equally many of these rows, and its cache has space for twice as many.
REMAINDERS = np.arange(12)
STORAGES = {"word": None, "item": rs.HostCached(cache_rows=NUM_NEAR), "user": rs.Hashed()}
PLACEMENTS = ("row", "table", "replicated", "column")


@functools.cache
def model_on(num_devices, placement):
    """A collection and its compiled step. The collection has no mesh if `num_devices` is 0."""
    features = []
    for name, storage in STORAGES.items():
        table = rs.TableSpec(
            name=name,
            vocabulary_size=ROWS[name],
            embedding_dim=DIM,
            optimizer=SGD,
            initializer=coarse,
            storage=storage,
        )
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    options = {}
    if num_devices:
        mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("device",))
        options = {"mesh": mesh, "placement": {"word": placement}, "exchange_capacity": 3}
    collection = rs.EmbeddingCollection(features, **options)

    @jax.jit
    def step(state, batch):
        read = collection.lookup(state, batch)
        return collection.update(state, batch, jax.tree.map(jnp.ones_like, read)), read

    return collection, step


class Collection(Machine):
    """Operations on a model. A run has only two meshes, because each takes seconds to compile."""

    @initialize(
        devices=st.integers(0, 4), others=st.integers(0, 4), placement=st.sampled_from(PLACEMENTS)
    )
    def begin(self, devices, others, placement):
        self.models = []
        for num_devices in (devices, others):
            placed = placement
            if placement == "column" and num_devices not in (1, 2):
                # Devices must have equally many of the two columns.
                placed = "row"
            self.models.append(model_on(num_devices, placed))
        self.collection, self.step = self.models[0]
        self.state = self.collection.init(jax.random.key(0))
        tables = self.collection.tables(self.state)
        steps = Steps((SGD,), (by_entry,))
        self.oracles = {
            name: DenseTable(np.asarray(tables[name]), "sum", steps) for name in ("word", "item")
        }
        # Initial values depend only on the key and on the name of the table, so they are those of
        # another collection.
        self.oracles["user"] = KeyedTable(collection_of(0)[4]["user"], "sum", steps)
        self.folder = tempfile.TemporaryDirectory(prefix="rsembed-fuzz-")
        self.saved = []

    def reads_of(self, seed):
        draw = np.random.default_rng(seed)
        near = REMAINDERS + len(REMAINDERS) * draw.integers(
            0, ROWS["item"] // len(REMAINDERS), len(REMAINDERS)
        )
        choices = {"word": np.arange(ROWS["word"]), "item": near, "user": KEYS}
        ids = {name: draw.choice(keys, (SAMPLES, WIDTH)) for name, keys in choices.items()}
        is_empty = draw.random((SAMPLES, WIDTH)) < draw.choice([0.0, 0.3, 1.0])
        reads = {}
        for name, feature_ids in ids.items():
            padded_ids = np.where(is_empty, -1, feature_ids)
            reads[name] = Read(padded_ids.astype(feature_ids.dtype), None)
        return reads

    def expect(self, actual, reads):
        for name, read in reads.items():
            expected = self.oracles[name].lookup({name: read})[name]
            np.testing.assert_array_equal(np.asarray(actual[name]), expected)

    @rule(seed=st.integers(0, 2**16))
    def train(self, seed):
        reads = self.reads_of(seed)
        batch = self.collection.prepare({name: read.ids for name, read in reads.items()})
        self.state, outputs = self.step(self.collection.prefetch(self.state, batch), batch)
        self.expect(outputs, reads)
        for name, read in reads.items():
            self.oracles[name].update({name: read}, {name: np.ones((SAMPLES, DIM))})

    @invariant()
    def holds_what_it_should(self):
        tables = self.collection.tables(self.state)
        for name in ("word", "item"):
            wanted = [self.oracles[name].rows[row][0] for row in range(ROWS[name])]
            np.testing.assert_array_equal(np.asarray(tables[name]), wanted)
        rows = self.oracles["user"].rows
        assert tables["user"]["keys"].tolist() == sorted(rows)
        expected = np.reshape([rows[key][0] for key in sorted(rows)], (-1, DIM))
        np.testing.assert_array_equal(tables["user"]["values"], expected)

    @rule(seed=st.integers(0, 2**16), name=st.sampled_from(["word", "item", "user"]))
    def replace(self, seed, name):
        draw = np.random.default_rng(seed)
        if name == "user":
            keys = np.unique(draw.choice(KEYS, 5))
            values = draw.integers(-9, 9, (len(keys), DIM)).astype(np.float32)
            arrays = {"keys": keys, "values": values}
            self.state = self.collection.with_tables(self.state, {name: arrays})
            for key, row in zip(keys.tolist(), values, strict=True):
                self.oracles[name].rows[key] = np.float64(row), [[]]
                self.oracles[name].last_step.setdefault(key, 0)
                self.oracles[name].occurrences.setdefault(key, 0)
        else:
            values = draw.integers(-9, 9, (ROWS[name], DIM)).astype(np.float32)
            self.state = self.collection.with_tables(self.state, {name: values})
            self.oracles[name] = DenseTable(values, "sum", self.oracles[name].steps)

    @rule()
    def save(self):
        path = pathlib.Path(self.folder.name) / str(len(self.saved))
        checkpoint.save_collection(path, self.collection, self.state)
        self.saved.append((path, copy.deepcopy(self.oracles)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), model=st.integers(0, 1))
    def load(self, data, model):
        """Loads the newest or an older checkpoint, on the same devices or on others."""
        path, oracles = data.draw(st.sampled_from(self.saved))
        self.collection, self.step = self.models[model]
        self.state = checkpoint.load_collection(path, self.collection)
        self.oracles = copy.deepcopy(oracles)

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


def run(seed: int) -> int:
    return live(Collection, seed, max_examples=4)
