"""Checkpoints of a long run, which a thread writes while training continues.

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
from collections.abc import Iterator
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
    Metadata,
    Others,
    Resize,
    already_exists,
    contents_of,
    from_first_process,
    load,
    load_collection,
    manifest,
    partial_path,
    same_error_everywhere,
    verify,
    write_folder,
)
from rsembed.checkpoint.states import CorruptCheckpointError, Template, belongings
from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.collection import EmbeddingCollection

_log = logging.getLogger("rsembed")
_LOCK = ".writer"
_NAME = re.compile(r"step_(\d{9,})")


class CheckpointManager:
    """Saves and restores the checkpoints of one run, and removes old checkpoints.

    `save` copies the arrays and returns, and a thread writes the copies while training continues.
    In a run of several processes, every process must have a manager and call the same methods in
    the same order, but only process 0 writes. `close` and the end of the `with` block wait for the
    last write. `restore` skips damaged checkpoints.

    Args:
      folder: folder with the checkpoints of this run. Only one process may write to the folder.
      collection: collection of the states that the manager saves. Without a collection, the manager
        saves any tree.
      max_to_keep: number of checkpoints to keep, by default all. Damaged checkpoints that `restore`
        skipped are removed first, then the oldest checkpoints.
      keep_period: number of steps. A checkpoint is never removed if its step is a multiple of
        `keep_period`. By default, `max_to_keep` applies to the checkpoints of all steps.
      read_only: whether the manager only reads, by default False. A manager that only reads writes
        no checkpoint and does not lock the folder. Pass True if the folder is not writable, or if
        another process writes to the folder.

    Raises:
      RuntimeError: another process writes to the folder. The error message has the host name and
        the id of the writing process.
      ValueError: `max_to_keep` or `keep_period` is smaller than 1.

    Example:
      >>> import tempfile, jax, rsembed as rs
      >>> sgd = rs.optimizers.SGD(0.1)
      >>> table = rs.TableSpec(name="word", vocabulary_size=9, embedding_dim=2, optimizer=sgd)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with rs.checkpoint.CheckpointManager(folder, collection, max_to_keep=2) as manager:
      ...         manager.save(state, others={"loss": 0.5})
      ...     again, others = manager.restore(others={"loss": 0.0})
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
        self.folder = Path(folder)
        self.collection = collection
        self.max_to_keep = max_to_keep
        self.keep_period = keep_period
        self.read_only = read_only
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rsembed-checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()
        self._is_closed = False
        self._lock = contextlib.ExitStack()
        with same_error_everywhere(self.folder):
            if jax.process_index() == 0 and not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(_only_writer(self.folder))
                # Remove partial checkpoints of earlier processes that were killed during a save.
                for partial in self.folder.glob(".step_*.partial"):
                    shutil.rmtree(partial, ignore_errors=True)

    # Writing

    @validated
    def save(
        self,
        tree: PyTree,
        *,
        step: NonNegativeInt | None = None,
        others: Others = None,
        metadata: Metadata | None = None,
    ) -> None:
        """Waits for the previous write, copies the arrays, and writes `step_<step>` in a thread.

        If the folder already has a damaged checkpoint of the same step, `save` replaces the damaged
        checkpoint and logs a warning.

        Args:
          tree: a state of the collection, or any tree for a manager without a collection.
          step: number of updates done so far. With a collection, leave `step` out, because a state
            contains its number of updates.
          others: any pytree to save together with a state, such as dense parameters.
          metadata: values that can be encoded as JSON, such as the position in the input data
            (`{"input": iterator.get_state()}`).

        Raises:
          FileExistsError: there is an undamaged checkpoint of this step.
          OSError: the previous checkpoint could not be written. The new checkpoint was not written,
            so call `save` again.
          RuntimeError: this manager is closed or read-only.
          TypeError, ValueError: see `rsembed.checkpoint.save_collection` and
            `rsembed.checkpoint.save`.
        """
        if self.read_only:
            way_out = "make one without read_only=True"
            raise RuntimeError(f"this CheckpointManager of {self.folder} only reads; {way_out}.")
        if self._is_closed:
            way_out = "make another CheckpointManager"
            raise RuntimeError(f"the checkpoints of {self.folder} are closed; {way_out}.")
        self.wait_until_finished()
        if self.collection is not None:
            if step is not None:
                raise ValueError("a state has its own step; leave step out.")
            contents = contents_of(self.collection, tree, others=others, metadata=metadata)
        else:
            if step is None or others is not None:
                needs = "step, and everything of the instant in it: no others"
                raise ValueError(f"a tree needs {needs}.")
            contents = Contents.of(tree, belongings(tree), step=step, metadata=metadata)
        path = self._path(contents.body["step"])
        if from_first_process(jax.process_index() == 0 and self._is_taken(path)):
            raise already_exists(path)
        self._pending = self._writer.submit(self._write, path, contents.in_memory())

    def wait_until_finished(self) -> None:
        """Waits until the last checkpoint has been written.

        Raises: OSError: the last checkpoint could not be written. A failed write does not block
          later calls of `save`.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            with same_error_everywhere(self.folder):
                pending.result()

    def close(self) -> None:
        """Waits for the last write and unlocks the folder.

        Raises: OSError: see `wait_until_finished`.
        """
        self._is_closed = True
        try:
            self.wait_until_finished()
        finally:
            self._writer.shutdown()
            self._lock.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # Ignore an error of the writer thread, which `_write` has logged, because the error of
            # the `with` block must propagate.
            self._pending = None
        self.close()

    # Reading

    def paths(self) -> list[Path]:
        """Folders of all checkpoints, in the order of their steps."""
        folders = [path for path in self.folder.glob("step_*") if _NAME.fullmatch(path.name)]
        return sorted(folders, key=_step)

    @validated
    def restore(
        self,
        like: Template = None,
        *,
        others: Others = None,
        step: NonNegativeInt | None = None,
        resize: Resize = False,
    ) -> PyTree:
        """State of the checkpoint at `step`, by default of the latest undamaged checkpoint.

        To continue a run from an earlier step, remove the folders of later steps.

        Args:
          like: template for a tree, see `load`. Leave `like` out if the manager has a collection.
          others: template for the `others` that were saved with a state, see `load_collection`.
          step: step of the checkpoint, by default the largest step with an undamaged checkpoint.
            A warning names each damaged checkpoint that `restore` skips.
          resize: whether tables of the collection may differ from the checkpoint in size or dtype,
            by default False, see `load_collection`.

        Returns: the result of `load_collection`, or of `load` without a collection.

        Raises:
          FileNotFoundError: the folder has no checkpoint, or no checkpoint of `step`.
          CorruptCheckpointError: the checkpoint of `step` is damaged, or all checkpoints are
            damaged.
          ValueError: see `load_collection` and `load`.
        """
        refused = like if self.collection is not None else others
        if refused is not None:
            way_out = "give others alone; of a tree, give like alone"
            raise ValueError(f"a collection has its own template: {way_out}.")
        if resize and self.collection is None:
            way_out = "leave it out for a tree"
            raise ValueError(f"restore: resize is of a collection's tables; {way_out}.")
        self.wait_until_finished()
        lacks = "no checkpoint, no folder step_<9 digits>"
        failure: Exception = FileNotFoundError(f"{self.folder} has {lacks}.")
        paths = self._newest_first() if step is None else [self._path(step)]
        for path in paths:
            result: PyTree = None
            problem: Exception | None = None
            try:
                if self.collection is None:
                    result = load(path, like)
                else:
                    result = load_collection(path, self.collection, others=others, resize=resize)
            except (OSError, CorruptCheckpointError) as error:
                problem = error
            is_loaded = np.asarray(problem is None)
            if multihost_utils.process_allgather(is_loaded).all():
                return result
            elsewhere = CorruptCheckpointError(f"{path}: another process could not read it.")
            failure = problem or elsewhere
            if step is None:
                self._damaged.add(path)
                warnings.warn(f"{path} is passed over: {failure}", stacklevel=2)
        raise failure

    @validated
    def metadata(self, step: NonNegativeInt) -> dict[str, PyTree]:
        """Metadata of the checkpoint at `step`, such as the position in the input data.

        Raises:
          FileNotFoundError: there is no checkpoint of this step.
          CorruptCheckpointError: the manifest of the checkpoint is damaged.
        """
        metadata: dict[str, PyTree] = manifest(self._path(step))["metadata"]
        if self.collection is None:
            return metadata
        return metadata.get("user", metadata)

    # Helpers

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"

    def _newest_first(self) -> Iterator[Path]:
        """Checkpoint folders that process 0 sees, from the latest step to the first.

        The folder of the run is listed again for every checkpoint, because another process may add
        or remove checkpoints.
        """
        tried: set[int] = set()
        while True:
            steps = {_step(path) for path in self.paths()}
            step = from_first_process(max(steps - tried, default=-1))
            if step < 0:
                return
            tried.add(step)
            yield self._path(step)

    def _is_taken(self, path: Path) -> bool:
        """Whether `path` has a checkpoint, after a damaged checkpoint has been removed."""
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
        """Writes a checkpoint and removes old checkpoints. The writer thread runs this method."""
        if jax.process_index() != 0:
            return
        try:
            write_folder(path, contents)
            self._damaged.discard(path)
            self._remove_old(path)
        except Exception as error:
            _log.error("checkpoint %s could not be written: %s", path, error)
            raise

    def _remove_old(self, newest: Path) -> None:
        """Removes old checkpoints if there are more than `max_to_keep`.

        Damaged checkpoints are removed first, then the oldest checkpoints. A checkpoint is never
        removed if its step is a multiple of `keep_period`, so more than `max_to_keep` checkpoints
        may remain.
        """
        if self.max_to_keep is None:
            return

        def removal_order(path: Path) -> tuple[bool, tuple[int, int]]:
            return path not in self._damaged, _written(path)

        others = [path for path in self.paths() if path != newest]
        others.sort(key=removal_order)
        num_checkpoints = len(others) + 1
        num_to_remove = max(num_checkpoints - self.max_to_keep, 0)
        for path in others[:num_to_remove]:
            if self.keep_period is None or _step(path) % self.keep_period:
                _remove(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _written(path: Path) -> tuple[int, int]:
    """Key that sorts the oldest checkpoint first: modification time of the manifest, and step."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns, _step(path)
    except OSError:
        return 0, _step(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint.

    The folder is renamed to a hidden name first, so that no partly removed checkpoint is visible.
    """
    hidden = partial_path(path)
    with contextlib.suppress(OSError):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder for this process.

    The lock is held until the end of the `with` block or of the process.

    Raises: RuntimeError: another process has the lock.
    """
    with open(folder / _LOCK, "a+") as file:
        file.seek(0)
        holder = file.read() or "it has not said which"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another process writes checkpoints into {folder}: {holder}. Give every run a "
                "folder of its own, or end the other one."
            ) from None
        except OSError as error:  # The file system does not support locks.
            way_out = "see to it that no other run writes there"
            _log.warning("%s cannot be locked (%s): %s.", folder, error, way_out)
        writer = {
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        file.truncate(0)
        file.write(json.dumps(writer))
        file.flush()
        yield
