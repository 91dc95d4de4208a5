"""Target: checkpoints of a run, against copies in memory: what comes back is what was saved, or an error."""

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
    """Saves, of which some are damaged, and some ends of the process that wrote them."""

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="rsembed-fuzz-"))
        self.draw = np.random.default_rng(seed)
        self.step, self.saved, self.damaged = 0, {}, False
        self.patched = contextlib.ExitStack()
        self.patched.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # damaged checkpoints are what is wanted
        self.manager = None
        self.tree = {name: self.draw.integers(0, 2, (20, 3)).astype(name) for name in DTYPES}
        self.tree |= {"one": np.int32(0), "none": np.zeros((0, 4)), "table": {}}
        self.change()
        self.open(max_to_keep=None)

    @rule(max_to_keep=st.sampled_from([None, 1, 3]))
    def open(self, max_to_keep):
        """As a process does that is started again."""
        if self.manager is not None:
            self.manager.close()
        self.max_to_keep = max_to_keep
        self.manager = CheckpointManager(self.folder, max_to_keep=max_to_keep)

    @rule()
    def change(self):
        """A few rows, and the keys of a table."""
        tree = {name: leaf.copy() for name, leaf in self.tree.items() if name != "table"}
        for name in DTYPES:
            tree[name][self.draw.integers(0, 20, self.draw.integers(4))] = self.draw.integers(0, 2)
        keys = np.unique(self.draw.integers(0, 40, 25))
        self.tree = tree | {
            "table": {"keys": keys, "values": np.float32(keys[:, None] * self.draw.integers(1, 3))}
        }

    @rule()
    def save(self):
        """Also of a step that has a damaged checkpoint, behind which the run went back."""
        self.step += 1
        self.manager.wait_until_finished()
        try:
            self.manager.save(self.tree, step=self.step)
        except FileExistsError:
            assert self.is_good(self.step)  # damage may undo damage
            return
        self.saved[self.step] = bits_of(self.tree)
        self.tree["float32"][0] += 1  # in memory that was given to save
        self.manager.wait_until_finished()
        assert self.is_good(self.step)

    def is_good(self, step):
        try:
            return (
                bits_of(checkpoint.load(self.folder / f"step_{step:09d}").tree) == self.saved[step]
            )
        except (OSError, CorruptCheckpointError):
            return False

    @rule(
        place=st.floats(0, 1, exclude_max=True),
        kind=st.sampled_from(["flip", "cut", "delete", "longer", "swap"]),
    )
    def damage(self, place, kind):
        """Something happens to a file of a checkpoint."""
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
        path.unlink() if kind == "delete" else path.write_bytes(data)

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
            assert (
                self.damaged
                or self.manager.folder.joinpath(f"step_{step:09d}") not in self.manager.paths()
            )
            return
        assert restored.step == step and bits_of(restored.tree) == self.saved[step]

    @rule()
    def keep(self):
        """As many as asked for, and those that they need."""
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
