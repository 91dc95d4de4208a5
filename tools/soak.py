"""Trains for a long time, with restarts. Fails if memory grows, a save fails, or a loss differs.

    python -m tools.soak --minutes 30

The learning rate changes every 100 steps. One table is in memory, and one is on the host with a
small device cache. The third table gets new keys in every step, which evict older keys. Every
minute the run saves a checkpoint. Every few minutes it is thrown away and restored from the newest
checkpoint. Before every second restore, a bit of the newest checkpoint is flipped, so that the run
continues from the checkpoint before, and saves the damaged step again. A twin of the run trains
with the same batches and is never stopped. The losses of both must be equal in every bit.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
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

import rsembed as rs
from rsembed.checkpoint import CheckpointManager

SAVE_SECONDS = 60.0
RESTORE_SECONDS = 150.0
SAMPLE_SECONDS = 5.0
MOST_GROWTH = 0.03
"""Largest accepted result of `Soak.growth`."""
BATCH = 128
WIDTH = 4
DIM = 16
RATE_STEPS = 100
LIBC = ctypes.CDLL(None)
TABLES = {
    "word": (20_000, None),
    "item": (50_000, rs.HostCached(cache_rows=4 * BATCH * WIDTH)),
    "user": (8_192, rs.Hashed(when_full="evict")),
}


def rate_of(step):
    return 0.02 / (1 + step // RATE_STEPS % 4).astype(jnp.float32)


def ids_of(step):
    """Ids of the batch of a step, by table.

    Half of the users are new. Items are almost never in the cache. Small ids of words become more
    frequent for 1,000 steps, and then start again.
    """
    draw = np.random.default_rng(step)
    shape = (BATCH, WIDTH)
    known_users = draw.zipf(1.3, shape) % 5000
    words = 20_000 * draw.random(shape) ** (1 + step % 1000 / 200)
    items = draw.integers(0, 50_000, shape, dtype=np.int32)
    is_new = draw.random(shape) < 0.5
    new_users = draw.integers(0, 2**62, shape)
    users = np.where(is_new, new_users, known_users)
    return {"word": words.astype(np.int32), "item": items, "user": users.astype(np.int64)}


def make_collection():
    rule = rs.optimizers.Adagrad(rate_of)
    features = []
    for name, (rows, storage) in TABLES.items():
        table = rs.TableSpec(
            name=name, vocabulary_size=rows, embedding_dim=DIM, optimizer=rule, storage=storage
        )
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    return rs.EmbeddingCollection(features)


class Run:
    """A collection with its state, and dense weights."""

    def __init__(self):
        # A collection has its own rows on the host, so every run needs one.
        self.collection = make_collection()
        self.state = self.collection.init(jax.random.key(0))
        self.weights = jnp.full((len(TABLES), DIM), 0.1, jnp.float32)

    @functools.cached_property
    def step(self):
        def loss_of(activations, weights, target):
            outputs = 0
            for vectors, table_weights in zip(activations.values(), weights, strict=True):
                outputs += vectors @ table_weights
            return jnp.mean((outputs - target) ** 2)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(state, weights, batch, target):
            activations, pullback = self.collection.lookup_vjp(state, batch)
            value_and_grad = jax.value_and_grad(loss_of, (0, 1))
            loss, (d_activations, d_weights) = value_and_grad(activations, weights, target)
            new_state = self.collection.apply(state, pullback(d_activations))
            new_weights = weights - rate_of(state.step) * d_weights
            return new_state, new_weights, loss

        return step

    @property
    def number(self):
        return int(self.state.step)

    def advance(self):
        """Makes a step, and returns its loss."""
        ids = ids_of(self.number)
        target = np.sin(ids["word"].sum(axis=1)).astype(np.float32)
        batch = self.collection.prepare(ids)
        state = self.collection.prefetch(self.state, batch)
        self.state, self.weights, loss = self.step(state, self.weights, batch, target)
        return np.float32(loss)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def resident_mebibytes():
    """Resident memory of this process, without freed memory that the allocator keeps."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """A run that saves checkpoints and is restored, its twin, and measurements of both."""

    def __init__(self, folder):
        self.folder = folder
        self.run = Run()
        self.twin = Run()
        # Losses of the twin. The array is large from the start, because its growth would count as
        # growth of memory.
        self.losses = np.full(1 << 20, np.nan, np.float32)
        self.num_repeated = 0
        self.num_restores = 0
        self.num_saves = 0
        self.damaged_step = None
        self.complaints = []
        self.seconds = []
        self.mebibytes = []
        self.open()

    def open(self):
        self.manager = CheckpointManager(self.folder, self.run.collection, max_to_keep=3)

    def advance(self):
        number = self.run.number
        place = number % self.losses.size
        if number == self.twin.number:
            self.losses[place] = self.twin.advance()
        else:
            self.num_repeated += 1
        loss = self.run.advance()
        if loss != self.losses[place]:
            self.complaints.append(
                f"step {number}: loss {loss!r}, the twin's is {self.losses[place]!r}"
            )

    def save(self):
        self.manager.save(self.run.state, others=self.run.weights)
        self.num_saves += 1

    def restore(self):
        self.manager.close()
        self.open()
        *others, newest = self.manager.paths()
        if others and self.num_restores % 2:
            flip_a_bit(max(newest.glob("*/c.*"), key=lambda file: file.stat().st_size))
            self.damaged_step = int(newest.name[5:])
        # A damaged checkpoint causes a warning.
        action = "ignore" if self.damaged_step else "error"
        with warnings.catch_warnings(action=action, category=UserWarning):
            self.run.state, self.run.weights = self.manager.restore(others=self.run.weights)
        self.num_restores += 1

    def last(
        self,
        seconds,
        *,
        save_seconds=SAVE_SECONDS,
        restore_seconds=RESTORE_SECONDS,
        sample_seconds=SAMPLE_SECONDS,
    ):
        start = time.monotonic()
        is_over = threading.Event()

        def sample():
            while not is_over.wait(sample_seconds):
                self.seconds.append(time.monotonic() - start)
                self.mebibytes.append(resident_mebibytes())

        watch = threading.Thread(target=sample)
        watch.start()
        next_save = save_seconds
        next_restore = restore_seconds
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
        return self

    def growth(self):
        """Median of memory in the last third of the time over that in the second third, minus 1."""
        _, second, third = np.array_split(self.mebibytes, 3)
        return float(np.median(third) / np.median(second) - 1)

    def __str__(self):
        evicted = int(np.sum(self.run.collection.counts(self.run.state)["user"]["evicted"]))
        return (
            f"{self.twin.number} steps, {self.num_repeated} of them twice; {self.num_saves} saves, {self.num_restores} "
            f"restores; {evicted:,} keys pushed out; memory in the last third over the second {self.growth():+.1%}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="rsembed-soak-") as folder:
        soak = Soak(Path(folder)).last(
            60 * minutes, sample_seconds=min(SAMPLE_SECONDS, 2 * minutes)
        )
        print(f"{'minute':>8}{'resident MiB':>16}")
        for k in range(0, len(soak.seconds), max(len(soak.seconds) // 20, 1)):
            print(f"{soak.seconds[k] / 60:>8.1f}{soak.mebibytes[k]:>16.0f}")
        print(soak)
    if soak.growth() > MOST_GROWTH:
        soak.complaints.append(f"memory grew by {soak.growth():.1%}; {MOST_GROWTH:.0%} may be")
    print(
        "\n".join(soak.complaints)
        or "losses equal the twin's in every bit, memory is flat, no save failed"
    )
    return int(bool(soak.complaints))


if __name__ == "__main__":
    sys.exit(main())
