"""Compares the batches of all processes before any process waits in a collective.

```
with Agreement(mesh, "the batch", batch) as agreement:   every process, in the same order
    ...  # everything that may raise
    agreement.bring("feature 'f'", "4 samples", width=3)  the text must be equal, the width may
    differ
agreement.width("feature 'f'")                            the largest width of all processes
```

The processes compare batches by messages through the coordination service of `jax.distributed`, not
by a collective on the devices. If the shapes of arrays differed between processes, a collective
would abort the processes without an error message. Unlike a message, a collective waits until the
devices have finished the current step.

For each batch, every process describes its batch in a message (a "record"). The first process of
the mesh compares the records, and sends the result of the comparison (the "verdict") to the other
processes. When a process ends, it sends a last record, which says that the process has ended. After
this last record, the next comparison in the other processes fails without waiting for the ended
process, and the error message says which process has ended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from rsembed.kernels.devices import has_devices, service_of_processes

TIMEOUT_SECONDS = 1800
"""Seconds to wait for a message from another process, which may still be writing a checkpoint."""
_RECEIPT_SECONDS = 10
"""Maximum wait in seconds until another process has read a verdict that reports an error."""
Record = dict[str, Any]
"""Content of a message between processes: the record of a process, or the verdict."""
_rounds: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
_used_before_fork: list[bool] = []
os.register_at_fork(after_in_child=lambda: _used_before_fork.append(has_devices()))


def check_not_forked(what: str) -> None:
    """Checks that this process was not forked from a process that uses JAX.

    The threads of JAX do not exist in a forked process.

    Args:
      what: subject of the error message, such as "the batch".

    Raises: RuntimeError: this process was forked after JAX had initialized its devices.
    """
    if any(_used_before_fork):
        raise RuntimeError(
            f"{what}: this process was forked from one that uses JAX, whose threads do not exist "
            "here. Start it with multiprocessing.get_context('spawn'), or leave to it what needs no "
            "JAX, such as reading files."
        )


class Agreement:
    """Context manager that compares the batches of all processes when its `with` block ends.

    An error inside the `with` block reaches all processes: one process raises it, and the others
    raise a ValueError that quotes it. In a run with a single process, nothing is compared.

    Args:
      mesh: mesh with devices of all processes that take part. None: only this process takes part,
        so nothing is compared.
      what: subject of error messages, such as `"the batch"`.
      batch: batch of this process. A batch that is traced, or has only global arrays, is the same
        in all processes, so nothing is compared.

    Raises: RuntimeError: this process was forked, see `check_not_forked`.
    """

    def __init__(self, mesh: Mesh | None, what: str, batch: PyTree):
        check_not_forked(what)
        self.what = what
        self.processes: tuple[int, ...] = ()
        if mesh is not None:
            processes = processes_of(mesh)
            if len(processes) > 1 and _is_local(batch):
                self.processes = processes
        self._shapes: dict[str, str] = {}
        self._widths: dict[str, int] = {}

    def bring(self, name: str, shape: str, *, width: int = 0) -> None:
        """Adds an entry to the record of this process.

        At the end of the `with` block, the records of all processes are compared.

        Args:
          name: name of the entry. All processes must pass the same names to `bring`, in the same
            order.
          shape: text that describes the entry, such as "4 samples". If `shape` differs between
            processes, every process raises an error.
          width: size of the entry in this process, such as the length of the longest bag. `width`
            may differ between processes.
        """
        self._shapes[name] = shape
        self._widths[name] = width

    def width(self, name: str) -> int:
        """Largest `width` that any process passed to `bring` for the entry `name`.

        Call `width` after the `with` block.
        """
        return self._widths[name]

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if jax.process_index() not in self.processes:
            return
        reason = None
        if error is not None:
            if not isinstance(error, Exception):  # After Ctrl-C, exit at once.
                return
            reason = f"{type(error).__name__}: {error}"
        record = {
            "what": self.what,
            "error": reason,
            "shapes": self._shapes,
            "widths": self._widths,
        }
        try:
            verdict = self._exchange(record)
        except jax.errors.JaxRuntimeError as failure:
            role = "through which the others reach each other"
            raise RuntimeError(
                f"{self.what}: process 0, {role}, has ended; see its own message."
            ) from failure
        if error is None and verdict["problem"] is not None:
            raise ValueError(f"{self.what}: {verdict['problem']}")
        self._widths = verdict["widths"]

    def _exchange(self, record: Record) -> Record:
        """Sends the record of this process, and returns the verdict of the first process."""
        client = service_of_processes()
        if client is None:
            way_out = "start each of them with rsembed.parallel.init()"
            raise RuntimeError(f"processes cannot reach each other; {way_out}.")
        first = self.processes[0]
        this = jax.process_index()
        number = next(_rounds[self.processes])
        group = _group(self.processes)
        prefix = f"{group}/{number}"
        if this == first:
            verdict = self._compare(client, prefix, record)
            if number:
                # A process sends the record of a batch only after it has read the verdict on the
                # previous batch. All records have arrived, so the previous verdict can be deleted.
                client.key_value_delete(f"{group}/{number - 1}")
            return verdict
        client.key_value_set(f"{prefix}/{this}", json.dumps(record))
        sender = f"process {first}, or one that it waits for,"
        verdict = self._receive(client, f"{prefix}/verdict", sender)
        if verdict["problem"] is not None:
            client.key_value_set(f"{prefix}/{this}/read", "")
        return verdict

    def _compare(self, client: Any, prefix: str, record: Record) -> Record:
        """Compares the records of all processes, and sends the verdict to the other processes."""
        first, *others = self.processes
        records = {first: record}
        for process in others:
            records[process] = self._receive(client, f"{prefix}/{process}", f"process {process}")
        problem = _problem(records)
        widths: dict[str, int] = {}
        if problem is None:
            for name in record["widths"]:
                widths[name] = max(other["widths"][name] for other in records.values())
        verdict = {"problem": problem, "widths": widths}
        client.key_value_set(f"{prefix}/verdict", json.dumps(verdict))
        if problem is not None:
            # If the verdict reports an error, the first process waits until the other processes
            # have read the verdict, because the first process may host the coordination service and
            # may end.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for process in others:
                    if "ended" not in records[process]:
                        key = f"{prefix}/{process}/read"
                        client.blocking_key_value_get(key, _RECEIPT_SECONDS * 1000)
        return verdict

    def _receive(self, client: Any, key: str, sender: str) -> Record:
        try:
            text = client.blocking_key_value_get(key, TIMEOUT_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as failure:
            if "DEADLINE" not in str(failure):
                raise
            raise RuntimeError(
                f"{self.what}: {sender} did not say what it brings within {TIMEOUT_SECONDS} s; every "
                "process must prepare and look up equally many batches, in the same order. "
                f"({failure})"
            ) from failure
        return json.loads(text)


def _group(processes: tuple[int, ...]) -> str:
    """Prefix of the names of messages between `processes` in the coordination service."""
    return f"rsembed/agreement/{'-'.join(map(str, processes))}"


def say_goodbye() -> None:
    """Tells the other processes that this process ends, so that their next comparison fails."""
    this = jax.process_index()
    error = getattr(sys, "last_value", None)
    if error is None:
        problem = "had no more batches and has ended; all processes must bring equally many"
    else:
        problem = f"has ended by {type(error).__name__}; see its own message"
    reason = f"process {this} {problem}."
    for processes, rounds in _rounds.items():
        prefix = f"{_group(processes)}/{next(rounds)}"
        if this == processes[0]:
            key = f"{prefix}/verdict"
            record: Record = {"problem": reason, "widths": {}}
        else:
            key = f"{prefix}/{this}"
            record = {"ended": reason}
        # A record or verdict cannot be sent if the coordination service has already ended.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            service_of_processes().key_value_set(key, json.dumps(record))


@functools.cache
def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """Indices of the processes that have devices in the mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_global(leaf: object) -> bool:
    """True if `leaf` is a JAX array with shards on devices of other processes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return not leaf.is_fully_addressable


def _is_local(batch: PyTree) -> bool:
    """Whether the processes may have different batches.

    The result is True if no leaf is traced, and at least one leaf is not global (see `is_global`).
    For a batch without leaves, the result is True.
    """
    # A list may have a million ids, so a list counts as one leaf.
    leaves = jax.tree.leaves(batch, is_leaf=lambda node: isinstance(node, list))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    return not leaves or not all(map(is_global, leaves))


def _problem(records: dict[int, Record]) -> str | None:
    """Description of the first difference between processes. None if all processes agree."""
    for process, record in records.items():
        if "ended" in record:
            return str(record["ended"])
        if record["error"] is not None:
            problem = f"refused what it was given ({record['error']})"
            return f"process {process} {problem}; see its own message."
    (first, expected), *others = records.items()
    there = _subject(expected)
    for process, record in others:
        here = _subject(record)
        if here != there:
            return (
                f"process {process} brings {here}, process {first} {there}; all processes must run "
                "the same program on batches of the same features, in the same order."
            )
        for name, shape in record["shapes"].items():
            expected_shape = expected["shapes"][name]
            if shape != expected_shape:
                return (
                    f"{name}: process {process} brings {shape}, process {first} {expected_shape}. "
                    "All processes must bring equally much in the same form; fill smaller batches "
                    "up with samples without ids."
                )
    return None


def _subject(record: Record) -> str:
    names = ", ".join(record["shapes"]) or "nothing"
    return f"{record['what']} with {names}"
