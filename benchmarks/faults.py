"""What a fault costs a run: each is done many times to checkpoints of rsembed and, beside it, of Orbax and torch.

    python benchmarks/faults.py --times 20

An outcome is one of: `newest` (the newest save came back to the bit), `older` (the one before did), `refused` (an
error, nothing came back), `WRONG` (something else came back, without an error).
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
    """What is saved at a step: nothing in it repeats, so that no two parts of files are equal."""
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

        self.ocp, self.manager = ocp, ocp.CheckpointManager(folder.absolute())

    def save(self, step: int) -> None:
        self.manager.save(step, args=self.ocp.args.StandardSave(tree_of(step)))
        self.manager.wait_until_finished()

    def restore(self) -> Any:
        step = self.manager.latest_step()
        return self.manager.restore(step, args=self.ocp.args.StandardRestore(tree_of(0)))


class Torch:
    """`torch.save` into a folder per step, as scripts around FBGEMM's module do."""

    def __init__(self, folder: Path):
        import torch

        self.torch, self.folder = torch, folder

    def save(self, step: int) -> None:
        path = self.folder / str(step)
        path.mkdir(parents=True)
        self.torch.save(
            {key: self.torch.as_tensor(value) for key, value in tree_of(step).items()},
            path / "model.pt",
        )

    def restore(self) -> Any:
        newest = max(self.folder.iterdir(), key=lambda path: int(path.name))
        return {key: tensor.numpy() for key, tensor in self.torch.load(newest / "model.pt").items()}


SUBJECTS: dict[str, Callable[[Path], Any]] = {"rsembed": Rsembed, "orbax": Orbax, "torch": Torch}


def saved_in_child(subject: Callable[[Path], Any], folder: Path, largest_file: int) -> None:
    """Says when the second save begins; the parent may end the process from then on."""
    manager = subject(folder)
    manager.save(1)
    print("saving", flush=True)
    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    manager.save(2)


def outcome(subject: Callable[[Path], Any], folder: Path) -> str:
    """What comes back from a folder that has had steps 1 and 2, or the second in part."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = subject(folder).restore()
    except Exception:
        return "refused"
    for step, name in ((2, "newest"), (1, "older")):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(tree_of(step)), strict=True)
        if all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs):
            return name
    return "WRONG"


# Faults: what happens to a folder, given a source of chance


def killed(name: str, folder: Path, chance: random.Random) -> None:
    """`kill -9` at any time of the second save."""
    with _child(name, folder) as child:
        assert child.stdout is not None and child.stdout.readline() == "saving\n"
        time.sleep(chance.uniform(0, 0.15))
        child.kill()


def full_disk(name: str, folder: Path, chance: random.Random) -> None:
    """No file of the second save may be larger than some bytes."""
    with _child(name, folder, largest_file=chance.randrange(1000, 1_000_000)) as child:
        child.wait()


def _child(name: str, folder: Path, largest_file: int = 0) -> Any:
    command = [sys.executable, __file__, "child", name, str(folder), str(largest_file)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
    )


def _files(folder: Path, chance: random.Random) -> list[Path]:
    """Files of the newest save, the ones with rows more likely first."""
    newest = max(
        (path for path in folder.iterdir() if path.is_dir()),
        key=lambda path: int(path.name.strip("step_")),
    )
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(files, key=lambda file: -file.stat().st_size * chance.random())


def flipped_bit(name: str, folder: Path, chance: random.Random) -> None:
    """One bit of the newest save is another."""
    file = _files(folder, chance)[0]
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut_file(name: str, folder: Path, chance: random.Random) -> None:
    """A file of the newest save ends too soon."""
    file = _files(folder, chance)[0]
    os.truncate(file, chance.randrange(file.stat().st_size))


def missing_file(name: str, folder: Path, chance: random.Random) -> None:
    """A file of the newest save is gone."""
    chance.choice(_files(folder, chance)).unlink()


def swapped_files(name: str, folder: Path, chance: random.Random) -> None:
    """Two files of the newest save are in each other's place."""
    first, second, *_ = _files(folder, chance) * 2  # of a single file, nothing changes
    spare = folder / "spare"
    if first != second:
        shutil.move(first, spare), shutil.move(second, first), shutil.move(spare, second)


FAULTS = (killed, full_disk, flipped_bit, cut_file, missing_file, swapped_files)


def measured(
    times: int, subjects: list[str], faults: Any = FAULTS
) -> dict[tuple[str, str], collections.Counter[str]]:
    """Outcomes by fault and subject."""
    found: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
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
                    found[fault.__name__, name][outcome(SUBJECTS[name], folder)] += 1
                    shutil.rmtree(folder)
    return found


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
    found = measured(arguments.times, arguments.subjects)
    print(f"| fault, {arguments.times} times | " + " | ".join(arguments.subjects) + " |")
    print("|---" * (1 + len(arguments.subjects)) + "|")
    for fault in FAULTS:
        cells = (found[fault.__name__, name] for name in arguments.subjects)
        texts = (
            ", ".join(f"{count} {what}" for what, count in cell.most_common()) for cell in cells
        )
        print(f"| {fault.__doc__} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
