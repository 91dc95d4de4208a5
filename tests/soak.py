"""Trains for long, and fails if memory grows, a save fails, or losses are not those of a run that nobody stops.

    python -m tests.soak --minutes 30

Tables are trained at a rate that changes: one in memory, one on the host whose cache churns, one of keys that are ever
new and push out others, and, by the SparseCore wing, one whose limits follow statistics. Every minute a checkpoint is
saved; every few minutes the run is thrown away and goes on from the newest. Every second time a bit of that is flipped,
so that the run goes on from the one before and saves the damaged step again. A twin of the same batches is left alone:
losses must agree in every bit. Beside both, a table of the model-parallel wing grows with its keys; it counts how often
it saw each, and must be right at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import logging
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rsembed as rs
from rsembed import fdo, sok
from rsembed.checkpoint import CheckpointManager
from rsembed.sparsecore import embedding

SAVE_SECONDS, RESTORE_SECONDS, SAMPLE_SECONDS = 60.0, 150.0, 5.0
MOST_GROWTH = 0.03
"""Share by which memory in the last third of the time may lie above that in the second third, in the median."""
BATCH, WIDTH, DIM, NUM_CORES = 128, 4, 16, 4
RATE_STEPS, LIMIT_STEPS = 100, 250
MOST_GROWING_KEYS, NEW_KEYS_A_STEP = 1 << 16, 16
LIBC = ctypes.CDLL(None)
MESH = Mesh(np.asarray(jax.devices()[:1]), ("shard",))
TABLES = {
    "word": (20_000, None),
    "item": (50_000, rs.HostCached(cache_rows=4 * BATCH * WIDTH)),
    "user": (8_192, rs.Hashed(when_full="evict")),
}


def rate_of(step):
    return 0.02 / (1 + step // RATE_STEPS % 4).astype(jnp.float32)


def ids_of(step):
    """Half of the users have never been seen before; items are as good as never in the cache; words get hotter."""
    draw = np.random.default_rng(step)
    shape = (BATCH, WIDTH)
    known = draw.zipf(1.3, shape) % 5000
    return {
        "word": (20_000 * draw.random(shape) ** (1 + step % 1000 / 200)).astype(np.int32),
        "item": draw.integers(0, 50_000, shape, dtype=np.int32),
        "user": np.where(draw.random(shape) < 0.5, draw.integers(0, 2**62, shape), known).astype(np.int64),
    }


def sparsecore_specs():
    table = embedding.TableSpec(
        name="token",
        vocabulary_size=20_000,
        embedding_dim=DIM,
        optimizer=rs.AdagradOptimizerSpec(0.02),
        combiner="sum",
        max_ids_per_partition=BATCH * WIDTH,
        max_unique_ids_per_partition=BATCH * WIDTH,
    )
    feature = embedding.FeatureSpec(
        name="token", table_spec=table, input_shape=(BATCH, WIDTH), output_shape=(BATCH, DIM)
    )
    embedding.prepare_feature_specs_for_training([feature], global_device_count=1, num_sc_per_device=NUM_CORES)
    return [feature]


def make_collection():
    rule = rs.AdagradOptimizerSpec(rate_of)
    tables = [
        rs.TableSpec(name=name, vocabulary_size=rows, embedding_dim=DIM, optimizer=rule, storage=storage)
        for name, (rows, storage) in TABLES.items()
    ]
    return rs.EmbeddingCollection([rs.FeatureSpec(name=table.name, table_spec=table) for table in tables])


class Run:
    """A model with what it has learned."""

    def __init__(self):
        self.collection = make_collection()  # each has its own rows on the host
        self.specs = sparsecore_specs()
        self.client = fdo.MemoryFDOClient()
        self.num_dropped, self.limits = 0, set()
        tables, rows = embedding.get_table_specs(self.specs), NamedSharding(MESH, PartitionSpec("shard", None))
        tokens = embedding.init_embedding_variables(jax.random.key(1), tables, rows, NUM_CORES)
        weights = jnp.full((len(TABLES) + 1, DIM), 0.1, jnp.float32)
        self.go_on_from(self.collection.init(jax.random.key(0)), {"weights": weights, "tokens": tokens})

    def go_on_from(self, state, others):
        # Tables of the wing lie on a mesh, so the step puts all there: what comes from elsewhere would compile it anew.
        self.state, self.others = jax.device_put((state, others), NamedSharding(MESH, PartitionSpec()))

    @functools.cached_property
    def step(self):
        specs = self.specs

        def loss_of(activations, tokens, weights, target):
            vectors = [*activations.values(), *tokens]
            return jnp.mean((sum(v @ w for v, w in zip(vectors, weights, strict=True)) - target) ** 2)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(state, others, batch, inputs, target):
            variables, weights = others["tokens"], others["weights"]
            activations, pullback = self.collection.lookup_vjp(state, batch)
            tokens = embedding.tpu_sparse_dense_matmul(inputs, variables, specs, global_device_count=1)
            loss, d = jax.value_and_grad(loss_of, (0, 1, 2))(activations, tokens, weights, target)
            weights = weights - rate_of(state.step) * d[2]
            variables = embedding.tpu_sparse_dense_matmul_grad(d[1], inputs, variables, specs)
            return self.collection.apply(state, pullback(d[0])), {"weights": weights, "tokens": variables}, loss

        return step

    @property
    def number(self):
        return int(self.state.step)

    def preprocessed(self, ids):
        inputs, statistics = embedding.preprocess_sparse_dense_matmul_input(
            [ids], None, self.specs, 1, 1, num_sc_per_device=NUM_CORES
        )
        self.num_dropped += sum(int(np.sum(count)) for count in statistics.id_drop_counters.values())
        self.client.record(statistics)
        if self.number % LIMIT_STEPS == LIMIT_STEPS - 1:
            self.client.publish()
            policy = fdo.LimitsPolicy(headroom_fraction=1.0, monotone=False, bucket=2.0)
            embedding.update_preprocessing_parameters(self.specs, self.client.load(), NUM_CORES, policy=policy)
            self.limits.add(self.specs[0].table_spec.stacked_table_spec.max_ids_per_partition)
        return inputs

    def advance(self):
        """One step; its loss."""
        ids = ids_of(self.number)
        target = np.sin(ids["word"].sum(axis=1)).astype(np.float32)
        batch = self.collection.prepare(ids)
        inputs = self.preprocessed(ids["word"])
        state = self.collection.prefetch(self.state, batch)
        self.state, self.others, loss = self.step(state, self.others, batch, inputs, target)
        return np.float32(loss)


class Counts:
    """A table that grows with its keys: a row is minus how often its key came."""

    def __init__(self):
        self.layer = sok.All2AllDenseEmbedding(
            256,
            DIM,
            1,
            WIDTH,
            embedding_initializer="zeros",
            optimizer=rs.SGDOptimizerSpec(1.0),
            when_full="grow",
            name="counts",
            context=sok.Init(mesh=MESH),
        )
        self.expected = np.zeros(MOST_GROWING_KEYS, np.int64)

    def advance(self, step):
        keys = 256 + NEW_KEYS_A_STEP * step - np.random.default_rng(step).integers(0, 256, (BATCH, 1, WIDTH))
        keys %= MOST_GROWING_KEYS
        np.add.at(self.expected, keys, 1)
        activations, backward = self.layer.vjp(keys)
        backward(jnp.ones_like(activations))

    def are_right(self):
        rows = sok.export_rows(self.layer.variable)
        expected = self.expected[rows["keys"]]
        return rows["keys"].size == np.count_nonzero(self.expected) and bool(
            (rows["values"] == -expected[:, None]).all()
        )


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def resident_mebibytes():
    """What is in use: memory that the allocator keeps to use it again, up to 256 MB, is given back before."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """Both runs, what is saved of one of them, and what was seen."""

    def __init__(self, folder):
        self.folder, self.run, self.twin, self.counts = folder, Run(), Run(), Counts()
        self.losses = np.full(1 << 20, np.nan, np.float32)  # of the twin, so many that memory does not grow later
        self.num_repeated = self.num_restores = self.num_saves = 0
        self.damaged_step = None
        self.complaints, self.seconds, self.mebibytes = [], [], []
        self.open()

    def open(self):
        self.manager = CheckpointManager(self.folder, self.run.collection, max_to_keep=3)

    def advance(self):
        number = self.run.number
        place = number % self.losses.size
        if number == self.twin.number:
            self.losses[place] = self.twin.advance()
            self.counts.advance(number)
        else:
            self.num_repeated += 1
        loss = self.run.advance()
        if loss != self.losses[place]:
            self.complaints.append(f"step {number}: loss {loss!r}, the twin's is {self.losses[place]!r}")

    def save(self):
        self.manager.save(self.run.state, others=self.run.others)
        self.num_saves += 1

    def restore(self):
        self.manager.close()
        self.open()
        *others, newest = self.manager.paths()
        if others and self.num_restores % 2:
            flip_a_bit(max(newest.glob("*/c.*"), key=lambda file: file.stat().st_size))
            self.damaged_step = int(newest.name[5:])
        with warnings.catch_warnings(action="ignore" if self.damaged_step else "error", category=UserWarning):
            self.run.go_on_from(*self.manager.restore(others=self.run.others))
        self.num_restores += 1

    def last(
        self, seconds, *, save_seconds=SAVE_SECONDS, restore_seconds=RESTORE_SECONDS, sample_seconds=SAMPLE_SECONDS
    ):
        start, is_over = time.monotonic(), threading.Event()

        def sample():
            while not is_over.wait(sample_seconds):
                self.seconds.append(time.monotonic() - start)
                self.mebibytes.append(resident_mebibytes())

        watch = threading.Thread(target=sample)
        watch.start()
        next_save, next_restore = save_seconds, restore_seconds
        try:
            while (now := time.monotonic() - start) < seconds and not self.complaints:
                self.advance()
                if now > next_save or self.run.number == self.damaged_step:
                    self.save()
                    next_save = now + save_seconds
                    self.damaged_step = None
                if now > next_restore and self.num_saves:
                    self.restore()
                    next_restore += restore_seconds
            self.manager.close()
        except OSError as error:
            self.complaints.append(f"a save or a restore failed: {error}")
        finally:
            is_over.set()
            watch.join()
        if not self.counts.are_right():
            self.complaints.append("the table that grew did not count right")
        if self.run.num_dropped:
            self.complaints.append(f"{self.run.num_dropped} ids were dropped: limits were too small")
        return self

    def growth(self):
        """Of the median of memory in the last third over that in the second third, as a share."""
        second, third = (np.median(part) for part in np.array_split(self.mebibytes, 3)[1:])
        return float(third / second - 1)

    def __str__(self):
        grown = self.counts.layer.variable.num_rows
        evicted = int(np.sum(self.run.collection.counts(self.run.state)["user"]["evicted"]))
        return (
            f"{self.twin.number} steps, {self.num_repeated} of them twice; {self.num_saves} saves, {self.num_restores} "
            f"restores; {evicted:,} keys pushed out, {grown:,} that a table grew for; "
            f"limits {sorted(self.twin.limits)}; memory in the last third over the second {self.growth():+.1%}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    logging.getLogger("rsembed").setLevel(logging.ERROR)  # growth is told each time
    with tempfile.TemporaryDirectory(prefix="rsembed-soak-") as folder:
        soak = Soak(Path(folder)).last(60 * minutes, sample_seconds=min(SAMPLE_SECONDS, 2 * minutes))
        print(f"{'minute':>8}{'resident MiB':>16}")
        for k in range(0, len(soak.seconds), max(len(soak.seconds) // 20, 1)):
            print(f"{soak.seconds[k] / 60:>8.1f}{soak.mebibytes[k]:>16.0f}")
        print(soak)
    if soak.growth() > MOST_GROWTH:
        soak.complaints.append(f"memory grew by {soak.growth():.1%}; {MOST_GROWTH:.0%} may be")
    print("\n".join(soak.complaints) or "losses equal the twin's in every bit, memory is flat, no save failed")
    return int(bool(soak.complaints))


if __name__ == "__main__":
    sys.exit(main())
