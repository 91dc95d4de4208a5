"""Comparison of what processes bring to a batch, made before any of them waits in a collective.

```
with Agreement(mesh, "the batch", batch) as agreement:   every process, in the same order
    ...  # all that may raise
    agreement.bring("feature 'f'", "4 samples", width=3)  what must be equal, and a size that need not be
agreement.width("feature 'f'")                            the largest size that any process brought
```

The devices take no part: a program whose shapes differ between processes ends them without a message, and waiting for
the devices would stall the step that still runs. Records travel through the service that connected the processes: every
process sends one and reads one, and the first process of the mesh compares them. A process that ends sends a last one,
for a round that it will not take part in: who brings another batch learns at once that this process had fewer.
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

# As long as others wait in collectives: a process may read data or write a checkpoint alone for a while.
TIMEOUT_SECONDS = 1800
# The first process, which keeps the service, stays so long for the others to read why the round failed.
_RECEIPT_SECONDS = 10
_rounds: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
_used_before_fork: list[bool] = []
os.register_at_fork(after_in_child=lambda: _used_before_fork.append(has_devices()))


def check_not_forked(what: str) -> None:
    """Raises: RuntimeError: this process was forked after JAX made its devices, and lacks JAX's threads."""
    if any(_used_before_fork):
        raise RuntimeError(
            f"{what}: this process was forked from one that uses JAX, whose threads do not exist here. Start it with "
            "multiprocessing.get_context('spawn'), or leave to it what needs no JAX, such as reading files."
        )


class Agreement:
    """One round in which the processes of a mesh compare what they bring; see the module.

    An error inside the `with` block reaches all processes: it is raised where it happened, and the others raise a
    ValueError that quotes it. In a single process nothing is compared. A forked process is refused, see
    `check_not_forked`.

    Args:
      mesh: mesh whose processes take part; None if there are no others.
      what: the subject of messages, such as `"the batch"`.
      given: what this process was given; there is nothing to agree on inside `jit`, nor about global arrays alone.
    """

    def __init__(self, mesh: Mesh | None, what: str, given: PyTree):
        check_not_forked(what)
        processes = () if mesh is None else processes_of(mesh)
        self.processes = processes if len(processes) > 1 and _has_own(given) else ()
        self.what = what
        self._brought: dict[str, tuple[str, int]] = {}
        self._widths: dict[str, int] | None = None

    def bring(self, name: str, shape: str, *, width: int = 0) -> None:
        """Records what this process brings for `name`, to be compared at the end of the block.

        Args:
          name: the same in all processes.
          shape: text about everything that must be equal.
          width: a size that may differ between processes.
        """
        self._brought[name] = shape, width

    def width(self, name: str) -> int:
        """The largest `width` that any process brought for `name`; call it after the block."""
        return self._brought[name][1] if self._widths is None else self._widths[name]

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_alone = jax.process_index() not in self.processes
        if is_alone or not (error is None or isinstance(error, Exception)):  # Ctrl-C ends the run at once
            return
        reason = None if error is None else f"{type(error).__name__}: {error}"
        try:
            verdict = self._exchange({"what": self.what, "error": reason, "brought": self._brought})
        except jax.errors.JaxRuntimeError as failure:
            raise RuntimeError(
                f"{self.what}: process 0, through which the others reach each other, has ended; see its own message."
            ) from failure
        if error is None and verdict["problem"] is not None:
            raise ValueError(f"{self.what}: {verdict['problem']}")
        self._widths = verdict["widths"]

    def _exchange(self, record: dict[str, PyTree]) -> PyTree:
        client = service_of_processes()
        if client is None:
            raise RuntimeError("processes cannot reach each other; start each of them with rsembed.parallel.init().")
        first, own = self.processes[0], jax.process_index()
        group = _group(self.processes)
        number = next(_rounds[self.processes])

        def received(key: str, sender: str) -> PyTree:
            try:
                return json.loads(client.blocking_key_value_get(f"{group}/{key}", TIMEOUT_SECONDS * 1000))
            except jax.errors.JaxRuntimeError as failure:
                if "DEADLINE" not in str(failure):
                    raise
                raise RuntimeError(
                    f"{self.what}: {sender} did not say what it brings within {TIMEOUT_SECONDS} s; every process must "
                    f"prepare and look up equally many batches, in the same order. ({failure})"
                ) from failure

        if own != first:
            client.key_value_set(f"{group}/{number}/{own}", json.dumps(record))
            verdict = received(f"{number}/verdict", f"process {first}, or one that it waits for,")
            if verdict["problem"] is not None:
                client.key_value_set(f"{group}/{number}/{own}/read", "")
            return verdict
        records = {first: json.loads(json.dumps(record))}
        records |= {other: received(f"{number}/{other}", f"process {other}") for other in self.processes[1:]}
        problem, names = _problem(records), record["brought"]
        widths = {} if problem else {k: max(own["brought"][k][1] for own in records.values()) for k in names}
        verdict = {"problem": problem, "widths": widths}
        client.key_value_set(f"{group}/{number}/verdict", json.dumps(verdict))
        if verdict["problem"] is not None:
            present = [other for other in self.processes[1:] if "ended" not in records[other]]
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for other in present:
                    client.blocking_key_value_get(f"{group}/{number}/{other}/read", _RECEIPT_SECONDS * 1000)
        if number:  # all have read it, since they are a round further
            client.key_value_delete(f"{group}/{number - 1}")
        return verdict


def _group(processes: tuple[int, ...]) -> str:
    """Name under which the records of a set of processes are kept."""
    return f"rsembed/agreement/{'-'.join(map(str, processes))}"


def say_goodbye() -> None:
    """Tells the other processes that this one has ended, so that their next comparison fails at once."""
    own, error = jax.process_index(), getattr(sys, "last_value", None)
    reason = f"process {own} has ended by {type(error).__name__}; see its own message."
    if error is None:
        reason = f"process {own} had no more batches and has ended; all processes must bring equally many."
    for processes, rounds in _rounds.items():
        is_first = own == processes[0]
        record = {"problem": reason, "widths": {}} if is_first else {"ended": reason}
        key = f"{_group(processes)}/{next(rounds)}/{'verdict' if is_first else own}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be gone
            service_of_processes().key_value_set(key, json.dumps(record))


@functools.cache
def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """Processes that have devices in the mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_global(leaf: PyTree) -> bool:
    """Whether the leaf is a JAX array with shards in other processes."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def _has_own(given: PyTree) -> bool:
    leaves = jax.tree.leaves(given, is_leaf=lambda value: isinstance(value, list))  # a list may hold a million ids
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) and not (
        leaves and all(map(is_global, leaves))
    )


def _problem(records: dict[int, Any]) -> str | None:
    """Description of a disagreement and of the processes in it; None if all agree."""
    for process, record in records.items():
        if "ended" in record:
            return str(record["ended"])
        if record["error"] is not None:
            return f"process {process} refused what it was given ({record['error']}); see its own message."
    (first, expected), *others = records.items()
    for process, record in others:
        here, there = (f"{own['what']} with {', '.join(own['brought']) or 'nothing'}" for own in (record, expected))
        if here != there:
            return (
                f"process {process} brings {here}, process {first} {there}; all processes must run the same program "
                "on batches of the same features, in the same order."
            )
        for name, (shape, _) in record["brought"].items():
            if shape != expected["brought"][name][0]:
                return (
                    f"{name}: process {process} brings {shape}, process {first} {expected['brought'][name][0]}. All "
                    "processes must bring equally much in the same form; fill smaller batches up with samples without "
                    "ids."
                )
    return None
