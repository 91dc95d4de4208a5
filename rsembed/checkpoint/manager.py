"""Checkpoints of a long run: written during training, the newest kept, the newest undamaged one restored.

```
save ──copy──▶ memory ──thread──▶ step_000000100/
                                  step_000000200/
```
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from rsembed.checkpoint.files import (
    MANIFEST,
    Contents,
    Resize,
    agreed,
    already_there,
    contents_of,
    hidden_beside,
    load,
    load_collection,
    manifest,
    raised_alike,
    verify,
    write_folder,
)
from rsembed.checkpoint.states import CorruptCheckpointError, belongings
from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.collection import EmbeddingCollection

_log = logging.getLogger("rsembed")
_LOCK = ".writer"
_NAME = re.compile(r"step_(\d{9,})")


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of one run, in a folder that only this run writes to.

    `save` copies what it is given and returns; a thread writes the copies while training goes on. With several
    processes all make the same calls; the copies come together in process 0, whose thread writes. Leave the `with`
    block, or call `close`, to wait for the last one.

    Args:
      folder: folder of the run; a second writer is refused.
      collection: collection whose states are saved, with any `others`; None saves any tree.
      max_to_keep: number of checkpoints to keep, the last written; what `restore` passed over goes first. None for all.
      keep_period: checkpoints whose step is a multiple of it are always kept.
      read_only: True writes nothing and locks nothing: for a folder that another process writes, or that nobody can.

    Raises:
      RuntimeError: another process writes here; says which.
      ValueError: a number is below 1.

    Example:
      >>> import tempfile, jax, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=9, embedding_dim=2, optimizer=rs.optimizers.SGD(0.1))
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
        max_to_keep: PositiveInt | None = None,
        keep_period: PositiveInt | None = None,
        read_only: bool = False,
    ):
        self.folder, self.collection = Path(folder), collection
        self.max_to_keep, self.keep_period, self.read_only = max_to_keep, keep_period, read_only
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rsembed-checkpoint")
        self._pending: Future[None] | None = None
        self._passed_over: set[Path] = set()
        self._is_closed, self._lock = False, contextlib.ExitStack()
        with raised_alike(self.folder):
            if jax.process_index() == 0 and not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(_only_writer(self.folder))
                for torn in self.folder.glob(".step_*.partial"):  # of this run, and nobody writes them any more
                    shutil.rmtree(torn, ignore_errors=True)

    # Writing

    @validated
    def save(
        self,
        tree: PyTree,
        *,
        step: NonNegativeInt | None = None,
        others: PyTree = None,
        metadata: Mapping[str, PyTree] | None = None,
    ) -> None:
        """Saves a checkpoint `step_<step>` in a thread, after waiting for the one before.

        Args:
          tree: a state of the collection, or any tree without one.
          step: step of a tree; a state has its own.
          others: any pytree to be saved with a state, such as dense parameters.
          metadata: values that JSON can hold, such as the position of the input (`{"input": iterator.get_state()}`).

        A damaged checkpoint of this step is replaced, which the log says.

        Raises:
          FileExistsError: there is a good checkpoint of this step.
          OSError: the checkpoint before could not be written. This one has not begun; the next call can.
          RuntimeError: this manager is closed, or only reads.
          TypeError, ValueError: as `save_collection` and `save`.
        """
        if self.read_only:
            raise RuntimeError(f"this CheckpointManager of {self.folder} only reads; make one without read_only=True.")
        if self._is_closed:
            raise RuntimeError(f"the checkpoints of {self.folder} are closed; make another CheckpointManager.")
        self.wait_until_finished()
        if self.collection is not None:
            if step is not None:
                raise ValueError("a state has its own step; leave step out.")
            contents = contents_of(self.collection, tree, others=others, metadata=metadata)
        else:
            if step is None or others is not None:
                raise ValueError("a tree needs step, and everything of the instant in it: no others.")
            contents = Contents.of(tree, belongings(tree), step=step, metadata=metadata)
        path = self._path(contents.body["step"])
        if agreed(jax.process_index() == 0 and self._is_taken(path)):
            raise already_there(path)
        self._pending = self._writer.submit(self._write, path, contents.in_memory())

    def wait_until_finished(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises: OSError: it could not be written; the next one may.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with raised_alike(self.folder):
                pending.result()

    def close(self) -> None:
        """Waits for the last write and releases the folder. Raises: OSError: as `wait_until_finished`."""
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
        if error is not None:
            self._pending = None  # its error is in the log; the one that is on its way says more
        self.close()

    # Reading

    def paths(self) -> list[Path]:
        """The checkpoints, by step."""
        return sorted((path for path in self.folder.glob("step_*") if _NAME.fullmatch(path.name)), key=_step)

    @validated
    def restore(
        self,
        like: PyTree = None,
        *,
        others: PyTree = None,
        step: NonNegativeInt | None = None,
        resize: Resize = False,
    ) -> PyTree:
        """The state that was saved at `step`, by default at the largest step whose checkpoint is undamaged.

        A run that goes back to an earlier step for good removes the folders of later ones.

        Args:
          like: a template for a tree, see `load`; a collection has its own.
          others: a template for what was saved beside a state, see `load_collection`.
          step: step to restore; None takes the newest undamaged checkpoint, and warns of each damaged one before it.
          resize: lets tables of a collection have another size or dtype, see `load_collection`.

        Returns: what `load_collection` returns, or of a tree the `Checkpoint` that `load` returns.

        Raises:
          FileNotFoundError: there is none.
          CorruptCheckpointError: the one of `step`, or all of them, are damaged.
          ValueError: as `load_collection` and `load`.
        """
        if (others if self.collection is None else like) is not None:
            raise ValueError("a collection has its own template: give others alone; of a tree, give like alone.")
        if resize and self.collection is None:
            raise ValueError("restore: resize is of a collection's tables; leave it out for a tree.")
        self.wait_until_finished()
        failure: Exception = FileNotFoundError(f"{self.folder} has no checkpoint, no folder step_<9 digits>.")
        for path in self._newest_first() if step is None else [self._path(step)]:
            found: PyTree = None
            problem: Exception | None = None
            try:
                if self.collection is None:
                    found = load(path, like)
                else:
                    found = load_collection(path, self.collection, others=others, resize=resize)
            except (OSError, CorruptCheckpointError) as error:
                problem = error
            if multihost_utils.process_allgather(np.asarray(problem is None)).all():
                return found
            failure = problem or CorruptCheckpointError(f"{path}: another process could not read it.")
            if step is None:
                self._passed_over.add(path)
                warnings.warn(f"{path} is passed over: {failure}", stacklevel=2)
        raise failure

    @validated
    def metadata(self, step: NonNegativeInt) -> dict[str, PyTree]:
        """The metadata given to `save` at a step, such as the position of the input.

        Raises: FileNotFoundError, CorruptCheckpointError: there is no such checkpoint, or its manifest is damaged.
        """
        found: dict[str, PyTree] = manifest(self._path(step))["metadata"]
        return found if self.collection is None else found.get("user", found)

    # Parts of these

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"

    def _newest_first(self) -> Iterator[Path]:
        """The checkpoints that process 0 sees, looked for anew each time, as a writer may go on meanwhile."""
        tried: set[int] = set()
        while (step := agreed(max({*map(_step, self.paths())} - tried, default=-1))) >= 0:
            tried.add(step)
            yield self._path(step)

    def _is_taken(self, path: Path) -> bool:
        """Whether the path has a checkpoint that must stay; removes a damaged one."""
        if not path.exists():
            return False
        try:
            verify(path)
        except (FileNotFoundError, CorruptCheckpointError) as problem:
            _log.warning("%s is damaged and is replaced: %s", path, problem)
            _remove(path)
        except (OSError, ValueError):
            _log.warning("%s cannot be read now, so it stays.", path)
        return path.exists()

    def _write(self, path: Path, contents: Contents) -> None:
        """Writes a checkpoint and removes older ones than the last `max_to_keep`; runs in the thread."""
        if jax.process_index() != 0:
            return
        try:
            write_folder(path, contents)
            self._passed_over.discard(path)
            if self.max_to_keep is not None:
                # Those that a restore passed over first, then the oldest: the process may be killed meanwhile.
                older = sorted({*self.paths()} - {path}, key=lambda own: (own not in self._passed_over, _written(own)))
                for own in older[: max(len(older) + 1 - self.max_to_keep, 0)]:
                    if self.keep_period is None or _step(own) % self.keep_period:
                        _remove(own)
        except Exception as error:
            _log.error("checkpoint %s could not be written: %s", path, error)
            raise


def _step(path: Path) -> int:
    return int(path.name[5:])


def _written(path: Path) -> tuple[int, int]:
    """Sort key of a checkpoint: the time of its manifest, which is written last, then its step."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns, _step(path)
    except OSError:
        return 0, _step(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint, under a hidden name first: half of one must not look like one."""
    hidden = hidden_beside(path)
    with contextlib.suppress(OSError):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def _only_writer(folder: Path) -> PyTree:
    """Locks a folder for this process until the block, or the process, ends.

    Raises: RuntimeError: another one holds it.
    """
    with open(folder / _LOCK, "a+") as file:
        file.seek(0)
        holder = file.read() or "it has not said which"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another process writes checkpoints into {folder}: {holder}. Give every run a folder of its own, or "
                "end the other one."
            ) from None
        except OSError as error:  # a file system without locks
            _log.warning("%s cannot be locked (%s): see to it that no other run writes there.", folder, error)
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
        file.flush()
        yield
