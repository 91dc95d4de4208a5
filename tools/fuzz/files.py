"""Target: checkpoints of a run. What is read must be what was saved, or an error."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile
import warnings

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from rsembed import checkpoint
from rsembed.checkpoint import CheckpointManager, CorruptCheckpointError
from tools.fuzz.machines import Machine, live

DTYPES = ("float32", "int8", "bool", "uint16")


def bits_of(tree):
    return {name: (str(leaf.dtype), leaf.shape, leaf.tobytes()) for name, leaf in _leaves(tree)}


def _leaves(tree, path=""):
    for name, leaf in sorted(tree.items()):
        if isinstance(leaf, dict):
            yield from _leaves(leaf, f"{path}{name}/")
        else:
            yield path + name, np.asarray(leaf)


class Files(Machine):
    """Saves and restores, damage to files, and restarts of the process."""

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="rsembed-fuzz-"))
        self.draw = np.random.default_rng(seed)
        self.step = 0
        self.saved = {}
        self.damaged = False
        self.patched = contextlib.ExitStack()
        self.patched.enter_context(warnings.catch_warnings())
        # A damaged checkpoint causes a warning.
        warnings.simplefilter("ignore")
        self.manager = None
        self.tree = {name: self.draw.integers(0, 2, (20, 3)).astype(name) for name in DTYPES}
        self.tree |= {"one": np.int32(0), "none": np.zeros((0, 4)), "table": {}}
        self.change()
        self.open(max_to_keep=None)

    @rule(max_to_keep=st.sampled_from([None, 1, 3]))
    def open(self, max_to_keep):
        """Makes a new manager, as after a restart of the process."""
        if self.manager is not None:
            self.manager.close()
        self.max_to_keep = max_to_keep
        self.manager = CheckpointManager(self.folder, max_to_keep=max_to_keep)

    @rule()
    def change(self):
        """Changes a few rows of the arrays, and the keys of the table."""
        tree = {name: leaf.copy() for name, leaf in self.tree.items() if name != "table"}
        for name in DTYPES:
            tree[name][self.draw.integers(0, 20, self.draw.integers(4))] = self.draw.integers(0, 2)
        keys = np.unique(self.draw.integers(0, 40, 25))
        values = np.float32(keys[:, None] * self.draw.integers(1, 3))
        self.tree = tree | {"table": {"keys": keys, "values": values}}

    @rule()
    def save(self):
        """Saves the next step, which may already have a damaged checkpoint."""
        self.step += 1
        self.manager.wait_until_finished()
        try:
            self.manager.save(self.tree, step=self.step)
        except FileExistsError:
            # The step has a good checkpoint, because new damage has undone old damage.
            assert self.is_good(self.step)
            return
        self.saved[self.step] = bits_of(self.tree)
        # Later changes of an array must not change the checkpoint.
        self.tree["float32"][0] += 1
        self.manager.wait_until_finished()
        assert self.is_good(self.step)

    def is_good(self, step):
        try:
            loaded = checkpoint.load(self.folder / f"step_{step:09d}")
            return bits_of(loaded.tree) == self.saved[step]
        except (OSError, CorruptCheckpointError):
            return False

    @rule(
        place=st.floats(0, 1, exclude_max=True),
        kind=st.sampled_from(["flip", "cut", "delete", "longer", "swap"]),
    )
    def damage(self, place, kind):
        """Damages a file of a checkpoint."""
        self.manager.wait_until_finished()
        files = sorted(path for path in self.folder.glob("step_*/**/*") if path.is_file())
        if not files:
            return
        path = files[int(place * len(files))]
        data = bytearray(path.read_bytes())
        if kind == "flip" and data:
            data[self.draw.integers(len(data))] ^= 1 << self.draw.integers(8)
        elif kind == "cut":
            data = data[: self.draw.integers(len(data) + 1)]
        elif kind == "longer":
            data += b"x"
        elif kind == "swap":
            data = bytearray(files[self.draw.integers(len(files))].read_bytes())
        if bytes(data) == path.read_bytes() and kind != "delete":
            return
        self.damaged = True
        if kind == "delete":
            path.unlink()
        else:
            path.write_bytes(data)

    @rule(after=st.booleans())
    def restore_newest(self, after):
        if after:
            self.manager.wait_until_finished()
        try:
            restored = self.manager.restore()
        except (FileNotFoundError, CorruptCheckpointError):
            assert self.damaged or not self.saved
            self.step = 0
            return
        assert bits_of(restored.tree) == self.saved[restored.step]
        assert self.damaged or restored.step == self.step
        self.step = restored.step

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore_one(self, data):
        self.manager.wait_until_finished()
        step = data.draw(st.sampled_from(sorted(self.saved)))
        try:
            restored = self.manager.restore(step=step)
        except (OSError, CorruptCheckpointError):
            path = self.manager.folder / f"step_{step:09d}"
            assert self.damaged or path not in self.manager.paths()
            return
        assert restored.step == step and bits_of(restored.tree) == self.saved[step]

    @rule()
    def keep(self):
        """Checks which checkpoints are kept, and that one of them is good."""
        self.manager.wait_until_finished()
        steps = [int(path.name[5:]) for path in self.manager.paths()]
        most = self.max_to_keep
        assert steps == sorted(steps) and set(steps) <= set(self.saved)
        if most is None and not self.damaged:
            assert steps[-1:] == sorted(self.saved)[-1:]
        assert any(map(self.is_good, steps)) or self.damaged or not self.saved

    def teardown(self):
        if getattr(self, "manager", None) is not None:
            self.manager.close()
            self.patched.close()
            shutil.rmtree(self.folder)


def run(seed: int) -> int:
    return live(Files, seed)
