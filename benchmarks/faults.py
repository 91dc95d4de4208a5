"""Damages checkpoints of rsembed, Orbax and torch many times, and prints what a restore returns.

    python benchmarks/faults.py --times 20

The outcome of a restore is one of:

* newest: the bits of the newest save
* older: the bits of the save before
* refused: an error
* WRONG: other values, without an error
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

SHAPE = (200_000, 16)


def tree_of(step: int) -> dict[str, Any]:
    """The tree that is saved at a step. Its values are random, so no two parts of files are equal."""
    rng = np.random.default_rng(step)
    return {
        "table": rng.normal(size=SHAPE).astype(np.float32),
        "slot": rng.normal(size=SHAPE[0]),
        "step": step,
    }


class Rsembed:
    """`CheckpointManager`."""

    def __init__(self, folder: Path):
        from rsembed.checkpoint import CheckpointManager

        self.manager = CheckpointManager(folder)

    def save(self, step: int) -> None:
        self.manager.save(tree_of(step), step=step)
        self.manager.wait_until_finished()

    def restore(self) -> Any:
        with self.manager:
            return self.manager.restore(tree_of(0)).tree


class Orbax:
    """`CheckpointManager` of Orbax with its standard handler."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp

        self.ocp = ocp
        self.manager = ocp.CheckpointManager(folder.absolute())

    def save(self, step: int) -> None:
        self.manager.save(step, args=self.ocp.args.StandardSave(tree_of(step)))
        self.manager.wait_until_finished()

    def restore(self) -> Any:
        step = self.manager.latest_step()
        return self.manager.restore(step, args=self.ocp.args.StandardRestore(tree_of(0)))


class Torch:
    """`torch.save` into one folder for each step, as scripts around FBGEMM's module do."""

    def __init__(self, folder: Path):
        import torch

        self.torch = torch
        self.folder = folder

    def save(self, step: int) -> None:
        path = self.folder / str(step)
        path.mkdir(parents=True)
        tensors = {key: self.torch.as_tensor(value) for key, value in tree_of(step).items()}
        self.torch.save(tensors, path / "model.pt")

    def restore(self) -> Any:
        newest = max(self.folder.iterdir(), key=lambda path: int(path.name))
        tensors = self.torch.load(newest / "model.pt")
        return {key: tensor.numpy() for key, tensor in tensors.items()}


SUBJECTS: dict[str, Callable[[Path], Any]] = {"rsembed": Rsembed, "orbax": Orbax, "torch": Torch}


def saved_in_child(subject: Callable[[Path], Any], folder: Path, largest_file: int) -> None:
    """Saves twice. Prints a line before the second save, from which on the parent may kill the process."""
    manager = subject(folder)
    manager.save(1)
    print("saving", flush=True)
    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    manager.save(2)


def outcome(subject: Callable[[Path], Any], folder: Path) -> str:
    """Outcome of a restore from a folder with step 1, and with step 2 or a part of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restored = subject(folder).restore()
    except Exception:
        return "refused"
    if has_equal_bits(restored, tree_of(2)):
        return "newest"
    if has_equal_bits(restored, tree_of(1)):
        return "older"
    return "WRONG"


def has_equal_bits(tree: Any, expected: Any) -> bool:
    """If all arrays of both trees have equal bits."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(leaf).tobytes() == np.asarray(other).tobytes() for leaf, other in leaves)


# Faults: functions of the name of a subject, a folder and a generator of random numbers. The
# docstring is the text in the printed table.


def killed(name: str, folder: Path, chance: random.Random) -> None:
    """`kill -9` at a random time of the second save."""
    with _child(name, folder) as child:
        assert child.stdout is not None and child.stdout.readline() == "saving\n"
        time.sleep(chance.uniform(0, 0.15))
        child.kill()


def full_disk(name: str, folder: Path, chance: random.Random) -> None:
    """The second save cannot write a file above a random size."""
    with _child(name, folder, largest_file=chance.randrange(1000, 1_000_000)) as child:
        child.wait()


def _child(name: str, folder: Path, largest_file: int = 0) -> Any:
    command = [sys.executable, __file__, "child", name, str(folder), str(largest_file)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
    )


def _files(folder: Path, chance: random.Random) -> list[Path]:
    """Files of the newest save in random order. Large files are more likely to be first."""
    steps = [path for path in folder.iterdir() if path.is_dir()]
    newest = max(steps, key=lambda path: int(path.name.strip("step_")))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(files, key=lambda file: -file.stat().st_size * chance.random())


def flipped_bit(name: str, folder: Path, chance: random.Random) -> None:
    """One bit of the newest save is flipped."""
    file = _files(folder, chance)[0]
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut_file(name: str, folder: Path, chance: random.Random) -> None:
    """A file of the newest save is cut off."""
    file = _files(folder, chance)[0]
    os.truncate(file, chance.randrange(file.stat().st_size))


def missing_file(name: str, folder: Path, chance: random.Random) -> None:
    """A file of the newest save is missing."""
    chance.choice(_files(folder, chance)).unlink()


def swapped_files(name: str, folder: Path, chance: random.Random) -> None:
    """Two files of the newest save are swapped."""
    files = _files(folder, chance)
    if len(files) < 2:
        return
    first, second, *_ = files
    spare = folder / "spare"
    shutil.move(first, spare)
    shutil.move(second, first)
    shutil.move(spare, second)


FAULTS = (killed, full_disk, flipped_bit, cut_file, missing_file, swapped_files)


def measured(
    times: int, subjects: list[str], faults: Any = FAULTS
) -> dict[tuple[str, str], collections.Counter[str]]:
    """Numbers of outcomes, by fault and subject."""
    outcomes: dict[tuple[str, str], collections.Counter[str]]
    outcomes = collections.defaultdict(collections.Counter)
    for name in subjects:
        with tempfile.TemporaryDirectory() as parent:
            whole = Path(parent) / "whole"
            saved_in_child(SUBJECTS[name], whole, 0)
            for fault in faults:
                for number in range(times):
                    folder = Path(parent) / f"{fault.__name__}_{number}"
                    if fault not in (killed, full_disk):
                        shutil.copytree(whole, folder)
                    fault(name, folder, random.Random(number))
                    outcomes[fault.__name__, name][outcome(SUBJECTS[name], folder)] += 1
                    shutil.rmtree(folder)
    return outcomes


def main() -> None:
    """Prints a table of outcomes."""
    if sys.argv[1:2] == ["child"]:
        _, _, name, folder, largest_file = sys.argv
        saved_in_child(SUBJECTS[name], Path(folder), int(largest_file))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=20)
    installed = [name for name in SUBJECTS if name != "torch" or importlib.util.find_spec("torch")]
    parser.add_argument("--subjects", nargs="*", default=installed)
    arguments = parser.parse_args()
    outcomes = measured(arguments.times, arguments.subjects)
    print(f"| fault, {arguments.times} times | {' | '.join(arguments.subjects)} |")
    print("|---" * (1 + len(arguments.subjects)) + "|")
    for fault in FAULTS:
        cells = []
        for name in arguments.subjects:
            counts = outcomes[fault.__name__, name].most_common()
            cells.append(", ".join(f"{count} {what}" for what, count in counts))
        print(f"| {fault.__doc__} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
