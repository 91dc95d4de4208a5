"""The checkpoints of a long run: written beside the training, as many kept as wanted, the newest good one found again.

```
save ──copy──▶ memory ──thread──▶ step_000000100/     full
                                  step_000000200/     rows that differ from 100
                                  step_000000300/     rows that differ from 200
```
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rsembed.checkpoint.collections import contents_of, load_collection
from rsembed.checkpoint.files import load, verify
from rsembed.checkpoint.manifests import manifest
from rsembed.checkpoint.saved import CorruptCheckpointError
from rsembed.checkpoint.states import belongings
from rsembed.checkpoint.writing import Contents, agreed, already_there, hidden_beside, written
from rsembed.checks import NonNegativeInt, validated
from rsembed.collection import EmbeddingCollection

fcntl: Any
try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None

_log = logging.getLogger("rsembed")
_LOCK = ".writer"
_NAME = re.compile(r"step_(\d+)")


class CheckpointManager:
    """Saves, keeps and finds the checkpoints of one run, in a folder that is the run's alone.

    `save` copies what it is given and returns; a thread writes the copies while training goes on. With several
    processes all make the same calls; the copies come together in process 0, whose thread writes. Leave the `with`
    block, or call `close`, to wait for the last one.

    Args:
      folder: of the run; a second writer is refused.
      collection: whose states are saved, with whatever stands beside them; None saves any tree.
      max_to_keep: how many of the newest stay; None keeps all.
      keep_period: those whose step is a multiple stay in any case.
      full_every: 1 makes every checkpoint a full one. `n` makes `n - 1` incremental ones follow each full one: of
        arrays of 16 KiB and more they hold the rows that differ from the checkpoint before, which stays as long as they
        do. What is on the disk is read to find out.
      asynchronous: False writes before `save` returns, and needs no memory for copies.

    Raises:
      RuntimeError: another process writes here; says which.
      ValueError: a number is below 1.

    Example:
      >>> import tempfile, jax, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=9, embedding_dim=2, optimizer=rs.SGDOptimizerSpec(0.1))
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with rs.checkpoint.CheckpointManager(folder, collection, max_to_keep=2) as checkpoints:
      ...         checkpoints.save(state, others={"loss": 0.5})
      ...     again, others = checkpoints.restore(others={"loss": 0.0})
      >>> others
      {'loss': 0.5}
    """

    @validated
    def __init__(
        self,
        folder: str | os.PathLike[str],
        collection: EmbeddingCollection | None = None,
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        full_every: int = 1,
        asynchronous: bool = True,
    ):
        for name, value in (("max_to_keep", max_to_keep), ("keep_period", keep_period), ("full_every", full_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or left out, got {value}.")
        self.folder, self.collection = Path(folder), collection
        self.max_to_keep, self.keep_period, self.full_every = max_to_keep, keep_period, full_every
        self.asynchronous = asynchronous
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rsembed-checkpoint")
        self._pending: Future[None] | None = None
        self._is_closed, self._lock = False, contextlib.ExitStack()
        failure: Exception | None = None
        if jax.process_index() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(_only_writer(self.folder))
                for torn in self.folder.glob(".step_*.partial"):  # of this run, and nobody writes them any more
                    shutil.rmtree(torn, ignore_errors=True)
            except (OSError, RuntimeError) as error:
                failure = error
        self._raise_alike(failure)

    # Writing

    @validated
    def save(
        self,
        tree: Any,
        *,
        step: NonNegativeInt | None = None,
        others: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a checkpoint `step_<step>` of one instant; the one before is waited for.

        Args:
          tree: a state of the collection, or any tree without one.
          step: of a tree; a state has its own.
          others: what else belongs to the instant, beside a state: any pytree, such as dense parameters.
          metadata: what JSON can hold, such as the position of the input (`{"input": iterator.get_state()}`).

        Raises:
          FileExistsError: there is a checkpoint of this step.
          OSError: the checkpoint before could not be written. This one has not begun; the next call can.
          TypeError, ValueError: as `save_collection` and `save`.
        """
        if self._is_closed:
            raise RuntimeError(f"the checkpoints of {self.folder} are closed; make another CheckpointManager.")
        self.wait_until_finished()
        contents = self._contents(tree, step, others, metadata)
        path = self._path(contents.body["step"])
        if agreed(path.exists()):
            raise already_there(path)
        base = self._base(contents.body["step"])
        if agreed(self.asynchronous or base is not None):
            contents = contents.in_memory()
            if jax.process_index() == 0:
                self._pending = self._writer.submit(self._write, path, contents, base)
            else:
                self._pending = Future()
                self._pending.set_result(None)
            if not self.asynchronous:
                self.wait_until_finished()
            return
        self._raise_alike(written(path, contents))
        self._remove_old()

    def wait_until_finished(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises: OSError: it could not be written; the next one may.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._raise_alike(pending.exception())

    def close(self) -> None:
        """Waits, and lets others write here. Raises: OSError: as `wait_until_finished`."""
        self._is_closed = True
        try:
            self.wait_until_finished()
        finally:
            self._writer.shutdown()
            self._lock.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # the error that is on its way says more; the log has this one
            pending = self._pending
            if pending is not None:
                pending.exception()
            self._writer.shutdown()
            self._lock.close()

    # Reading

    def paths(self) -> list[Path]:
        """The checkpoints, by step."""
        found = {path: _NAME.fullmatch(path.name) for path in self.folder.glob("step_*")}
        return sorted((path for path, match in found.items() if match), key=lambda path: int(path.name[5:]))

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, whatever is in it."""
        paths = self.paths()
        return int(paths[-1].name[5:]) if paths else None

    def latest_good(self) -> Path | None:
        """The newest checkpoint of which every byte is what was written; damaged ones are told of and passed over.

        One that is being written is waited for: once it is there, those before it may go.
        """
        if self._pending is not None:
            self._pending.exception()  # left for `save` and `wait_until_finished` to raise, in all processes alike
        for path in reversed(self.paths()):
            try:
                verify(path)
                return path
            except (OSError, CorruptCheckpointError) as error:
                warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
        return None

    @validated
    def restore(self, like: Any = None, *, others: Any = None, step: int | None = None) -> Any:
        """What was saved at a step, or the newest that is good.

        Args:
          like: a template for a tree, see `load`; a collection has its own.
          others: a template for what was saved beside a state, see `load_collection`.
          step: of which; None takes the newest whose bytes are those written, and warns of each that it passes over.

        Returns: what `load_collection` returns, or of a tree the `Checkpoint` that `load` returns.

        Raises:
          FileNotFoundError: there is none.
          CorruptCheckpointError: the one of `step`, or all of them, are damaged.
          ValueError: as `load_collection` and `load`.
        """
        self.wait_until_finished()
        paths = self.paths() if step is None else [self._path(step)]
        failure: Exception = FileNotFoundError(f"{self.folder} has no checkpoint.")
        for path in reversed(paths):
            found: Any = None
            problem: Exception | None = None
            try:
                if self.collection is None:
                    found = load(path, like)
                else:
                    found = load_collection(path, self.collection, others=others)
            except (OSError, CorruptCheckpointError) as error:
                problem = error
            if _all_agree(problem is None):
                return found
            failure = problem or CorruptCheckpointError(f"{path}: another process could not read it.")
            if step is None:
                warnings.warn(f"{path} is passed over: {failure}", stacklevel=2)
        raise failure

    def metadata(self, step: int) -> dict[str, Any]:
        """What `save` was given as metadata at a step, such as that of a state that `restore` returned.

        Raises: FileNotFoundError, CorruptCheckpointError: there is no such checkpoint, or its manifest is damaged.
        """
        found: dict[str, Any] = manifest(self._path(step))["metadata"]
        return found if self.collection is None else found["user"]

    # Parts of these

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"

    def _contents(self, tree: Any, step: int | None, others: Any, metadata: Mapping[str, Any] | None) -> Contents:
        if self.collection is not None:
            if step is not None:
                raise ValueError("a state has its own step; leave step out.")
            return contents_of(self.collection, tree, others=others, metadata=metadata)
        if step is None or others is not None:
            raise ValueError("a tree needs step, and everything of the instant in it: no others.")
        return Contents.of(tree, belongings(tree), step=step, metadata=metadata)

    def _base(self, step: int) -> Path | None:
        """The checkpoint whose changes the next one holds; None for a full one."""
        chain = self._chain(self.paths()[-1]) if self.full_every > 1 and self.paths() else []
        is_due = 0 < len(chain) < self.full_every and int(chain[0].name[5:]) < step
        return chain[0] if is_due else None

    def _chain(self, path: Path) -> list[Path]:
        """A checkpoint and those that it needs; nothing if one of them is not there."""
        chain = [path]
        try:
            while (base := manifest(chain[-1]).get("base")) is not None:
                chain.append(path.with_name(base["name"]))
        except (OSError, ValueError):
            return []
        return chain

    def _write(self, path: Path, contents: Contents, base: Path | None) -> None:
        """Runs in the thread."""
        try:
            try:
                failure = written(path, contents, base, show=False)
            except CorruptCheckpointError as error:
                warnings.warn(f"{path} becomes a full checkpoint: {error}", stacklevel=2)
                failure = written(path, contents, show=False)
            if failure is not None:
                raise failure
            self._remove_old()
        except Exception as error:
            _log.error("checkpoint %s could not be written: %s", path, error)
            raise

    def _remove_old(self) -> None:
        if self.max_to_keep is None or jax.process_index() != 0:
            return
        paths = self.paths()
        kept = set(paths[-self.max_to_keep :])
        if self.keep_period is not None:
            kept |= {path for path in paths if int(path.name[5:]) % self.keep_period == 0}
        needed = kept.union(*(self._chain(path) for path in kept))
        for path in set(paths) - needed:
            # Under a hidden name first: half of a checkpoint must not look like one.
            hidden = hidden_beside(path)
            with contextlib.suppress(OSError):
                path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _raise_alike(self, failure: BaseException | None) -> None:
        """Raises what went wrong in process 0, in all processes."""
        if agreed(failure is not None):
            raise failure or OSError(f"{self.folder}: process 0 could not write; its own error says why.")


def _all_agree(flag: bool) -> bool:
    return bool(multihost_utils.process_allgather(np.asarray(flag)).all()) if jax.process_count() > 1 else flag


@contextlib.contextmanager
def _only_writer(folder: Path) -> Any:
    """Holds a folder for this process, until the end of the block or of the process, however it comes.

    Raises: RuntimeError: another one holds it.
    """
    with open(folder / _LOCK, "a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "it has not said which"
            raise RuntimeError(
                f"another process writes checkpoints into {folder}: {holder}. Give every run a folder of its own, or "
                "end the other one."
            ) from None
        except OSError as error:  # a file system without locks
            _log.warning("%s cannot be locked (%s): see to it that no other run writes there.", folder, error)
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
        file.flush()
        yield
        file.seek(0)
        file.truncate()
