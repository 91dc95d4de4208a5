"""Runs of one script on any number of devices and processes: start, mesh, orderly end.

```
init()  ─▶  mesh = make_mesh()  ─▶  your jitted step  ─▶  preempted(step): save and leave
```

Where a process finds the others is no business of the script: see `init`. docs/distributed.md tells how to start it;
`launch` starts several processes on this machine, to try what Slurm, Kubernetes or a TPU pod will run.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.kernels.devices import check_threads, provide_threads, thread_settings
from rsembed.parallel.agreement import say_goodbye

_log = logging.getLogger("rsembed")
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST", "TPU_WORKER_HOSTNAMES")
_terminated = threading.Event()
_watches_preemption = False


@validated
def init(
    coordinator_address: str | None = None,
    *,
    num_processes: PositiveInt | None = None,
    process_id: NonNegativeInt | None = None,
    local_device_ids: Sequence[int] | None = None,
    preemption: bool = False,
    heartbeat_timeout_seconds: PositiveInt = 30,
    initialization_timeout_seconds: PositiveInt = 60,
    shutdown_timeout_seconds: PositiveInt = 30,
) -> None:
    """Connects this process with the others of its run; the first call of a script, before any array is made.

    What is not given is read from `RSEMBED_COORDINATOR_ADDRESS`, `RSEMBED_NUM_PROCESSES` and `RSEMBED_PROCESS_ID` (or
    the same names with `JAX_`), then detected by `jax.distributed` (Slurm, Open MPI, Kubernetes, TPU pods). A process
    that finds no others does nothing. So does a second call.

    A process that dies takes the run with it: JAX aborts the others after `heartbeat_timeout_seconds`, naming the
    process, instead of leaving them in a collective for ever. After an uncaught exception a process leaves at once,
    without waiting for others that wait for it. A run that ends well ends together.

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: processes of the run; 1 keeps this process alone, whatever the environment says.
      process_id: the number of this one, from 0.
      local_device_ids: accelerators that this process may use; None means all it sees, or what the cluster assigns.
      preemption: take SIGTERM as the announcement that the machine will go, see `preempted`.
      heartbeat_timeout_seconds: silence after which a process counts as dead. Raise it if long compilations or slow
        storage starve the machine.
      initialization_timeout_seconds: how long to wait for the others to appear. Then JAX aborts the process; a warning
        before that says whom it waited for.
      shutdown_timeout_seconds: how long a process that is done waits for the others.

    Raises:
      ValueError: an address without numbers or the reverse, a number out of range, a timeout below 1.
      RuntimeError: JAX was used before, a cluster could not be read, or a second call asks for another run.
    """
    global _watches_preemption
    timeouts = {
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "initialization_timeout": initialization_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
    }
    address = coordinator_address or _environment("COORDINATOR_ADDRESS")
    num_processes = _environment_int("NUM_PROCESSES") if num_processes is None else num_processes
    process_id = _environment_int("PROCESS_ID") if process_id is None else process_id
    if jax.distributed.is_initialized():
        running = (jax.process_count(), jax.process_index())
        if num_processes not in (None, running[0]) or process_id not in (None, running[1]):
            raise RuntimeError(
                f"init: this is process {running[1]} of {running[0]} already; it cannot become process {process_id} "
                f"of {num_processes}. Call init() once, with the arguments of the run."
            )
        is_alone = False
    else:
        # Both ways explicitly: the default differs between versions of JAX.
        jax.config.update("jax_enable_preemption_service", preemption)
        is_alone = num_processes == 1 or not _connect(address, num_processes, process_id, local_device_ids, timeouts)
        if not is_alone:
            atexit.register(_leave)
            _log.info("process %d of %d", jax.process_index(), jax.process_count())
    if preemption and not _watches_preemption:
        if is_alone:
            signal.signal(signal.SIGTERM, lambda number, frame: _terminated.set())
        _watches_preemption = True


def _environment(name: str) -> str | None:
    return os.environ.get(f"RSEMBED_{name}") or os.environ.get(f"JAX_{name}")


def _environment_int(name: str) -> int | None:
    text = _environment(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"init: RSEMBED_{name} (or JAX_{name}) must be a number, got {text!r}.")
    return None if text is None else int(text)


def _connect(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    timeouts: dict[str, Any],
) -> bool:
    """Connects to the other processes of the run; False if there are none."""
    is_asked_for = not (address is None and num_processes is None and process_id is None)
    initialization = timeouts["initialization_timeout"]
    who = f"init: process {process_id} of {num_processes} at {address}" if is_asked_for else "init: this process"
    # JAX aborts the process when its time is up, without an exception that could explain it.
    explain = threading.Timer(
        0.8 * initialization,
        _log.warning,
        [
            f"{who} still waits for the others, and will be ended after {initialization} s. Are all of them running, "
            "with the same address and number of processes? Can they reach each other?"
        ],
    )
    explain.daemon = True
    explain.start()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES", ""))
    if local_device_ids is None and seen and "," not in seen:
        # Slurm's --gpus-per-task=1 shows each task one GPU, which is its number 0; JAX would take the task's number.
        local_device_ids = [0]
    try:
        jax.distributed.initialize(address, num_processes, process_id, local_device_ids, **timeouts)
    except ValueError as error:
        if not is_asked_for and "coordinator_address" in str(error):  # no cluster was detected
            return False
        raise ValueError(
            f"{who}: {error} Give all three (or set RSEMBED_COORDINATOR_ADDRESS, RSEMBED_NUM_PROCESSES and "
            "RSEMBED_PROCESS_ID), or start the script with `python -m rsembed launch`."
        ) from error
    except RuntimeError as error:
        is_late = "must be called before" in str(error)
        if is_late and not is_asked_for and not any(name in os.environ for name in _LAUNCHERS):
            return False  # a notebook: nobody else is there, so late is not too late
        reason = "JAX has already made its devices; call init() before any array" if is_late else str(error)
        raise RuntimeError(f"{who}: {reason}. A single process needs no init, or init(num_processes=1).") from error
    finally:
        explain.cancel()
    return True


def _leave() -> None:
    """Calls `say_goodbye`; after an error it ends the process at once, since JAX would wait for the others."""
    say_goodbye()
    if getattr(sys, "last_value", None) is not None:
        process = f"process {jax.process_index()} of {jax.process_count()}"
        print(
            f"rsembed: {process} ends the run: {type(sys.last_value).__name__}, see above. If it speaks of a peer or "
            "of a connection, another process died first: look there, then start again from the latest checkpoint.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def preempted(step: int) -> bool:
    """Whether to save and leave now, because some process of the run received SIGTERM.

    All processes get True at the same step, a step or more after the signal, and only at that step.

    Args:
      step: the number of the step; every process calls this once per step, with rising numbers.

    Raises: RuntimeError: `init(preemption=True)` was not called.
    """
    if not _watches_preemption:
        raise RuntimeError("preempted: nobody listens for SIGTERM; call init(preemption=True) first.")
    if jax.distributed.is_initialized():
        return bool(multihost_utils.reached_preemption_sync_point(step))
    return _terminated.is_set()


@validated
def make_mesh(axis: str = "shard", num_devices: int | None = None) -> Mesh:
    """A mesh of one axis over the devices of all processes; tables and batches are split along it.

    This is the one place that makes meshes. The axis is `Auto`: `jax.make_mesh` alone would give an `Explicit` one,
    under which a sharded table can no longer be indexed outside `shard_map`.

    Args:
      axis: name of the axis.
      num_devices: number of devices, equally many of every process; None takes all.

    Raises: ValueError: there are not as many, or they cannot be split equally over the processes.
    """
    provide_threads()
    devices, num_processes = jax.devices(), jax.process_count()
    if num_devices is not None:
        share = num_devices // num_processes
        own = [[d for d in devices if d.process_index == process][:share] for process in range(num_processes)]
        devices = [device for some in own for device in some]
        if num_devices < 1 or len(devices) != num_devices:
            raise ValueError(
                f"make_mesh: {num_devices} devices cannot be taken equally from {num_processes} processes with "
                f"{jax.device_count()} devices in all; for more CPU devices set JAX_NUM_CPU_DEVICES, or use "
                "`python -m rsembed launch --devices-per-process`."
            )
    mesh = Mesh(np.asarray(devices), (axis,), axis_types=(AxisType.Auto,))
    check_threads(mesh)
    return mesh


# Several processes on this machine

# After a failure, the others get this long to report theirs; after Ctrl-C, to clean up.
GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
# The exit status of a script that was preempted and asks to be started again.
_START_AGAIN = getattr(os, "EX_TEMPFAIL", 75)
_HINTS: dict[int, str] = {
    -_START_AGAIN: " (so a script that was preempted asks to be started again)",
    getattr(signal, "SIGKILL", 9): " (so the system ends a process when memory runs out)",
    signal.SIGABRT: " (so JAX ends a process when another fell silent; its message names that one)",
}
_FAKE_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*")


@validated
def launch(
    script: str, arguments: Sequence[str] = (), *, num_processes: PositiveInt = 2, devices_per_process: PositiveInt = 1
) -> int:
    """Runs a script in several processes with CPU devices of their own, until all are done or one fails.

    Lines are printed with the process's number in front. When a process fails, the others are killed, for they would
    wait for it; standard error then says which one, how, and what to do. Ctrl-C and SIGTERM are passed on; a second
    Ctrl-C kills.

    Args:
      script: path of a Python file that calls `rsembed.parallel.init()`.
      arguments: arguments of the script.
      num_processes: number of processes to start.
      devices_per_process: CPU devices of each.

    Returns: 0, the exit status of the first process that failed, or 128 plus the signal that ended it or the run.

    Raises: ValueError: a count below 1, or no such script.
    """
    if not os.path.isfile(script):
        raise ValueError(f"launch: there is no script {script!r}.")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # to a port that is free
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    received: list[int] = []
    ended: list[int] = []  # processes in the order in which they were seen to end

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        for child in children:
            if received.count(signal.SIGINT) > 1:
                child.kill()
            else:
                child.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for process in range(num_processes):
            child = subprocess.Popen(
                [sys.executable, script, *arguments],
                env=_environment_of(process, num_processes, devices_per_process, address),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches this process alone, which passes it on
            )
            children.append(child)
            readers.append(threading.Thread(target=_follow, args=(process, child, ended)))
            readers[-1].start()
        return _wait(children, ended, received)
    finally:
        for child in children:
            child.kill()
        for reader in readers:
            reader.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _environment_of(process: int, num_processes: int, num_devices: int, address: str) -> dict[str, str]:
    own = {
        "RSEMBED_COORDINATOR_ADDRESS": address,
        "RSEMBED_NUM_PROCESSES": str(num_processes),
        "RSEMBED_PROCESS_ID": str(process),
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX's default listens to the whole network
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_FLAGS": _FAKE_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")).strip(),
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | own | thread_settings(num_devices)


def _follow(process: int, child: subprocess.Popen[bytes], ended: list[int]) -> None:
    """Copies the output of a process, line by line, until it has ended."""
    with cast(IO[bytes], child.stdout) as lines:
        for line in lines:
            # One write per line, so that lines of different processes do not mix.
            sys.stdout.write(f"[{process}] {line.decode(errors='replace').rstrip()}\n")
            sys.stdout.flush()
    child.wait()
    ended.append(process)


def _wait(children: Sequence[subprocess.Popen[bytes]], ended: Sequence[int], received: Sequence[int]) -> int:
    """The status of the run, when all processes are done, or when one has failed and the others had their time."""
    start, deadline = time.monotonic(), None
    while True:
        # The failure that led to the others is the first, or the first of those that were killed: the system closes the
        # connections of a process before it has ended, and another may have failed for it by then. Who aborts found a
        # peer silent.
        all_failed = [own for own in ended if children[own].returncode]
        were_killed = [own for own in all_failed if -signal.SIGABRT != children[own].returncode < 0]
        failed = next(iter(were_killed or all_failed), None)
        # SIGTERM alone sets no deadline: it announces an end, and a script that listens takes its time to save.
        if deadline is None and (failed is not None or signal.SIGINT in received):
            deadline = time.monotonic() + GRACE_SECONDS
        if len(ended) == len(children) or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(_POLL_SECONDS)
    status = 0 if failed is None else children[failed].returncode
    if received and status != _START_AGAIN:
        return 0 if failed is None and signal.SIGINT not in received else 128 + received[0]
    if failed is None:
        return 0
    others = "".join(f" Process {own} failed, too." for own in all_failed if own != failed)
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"
    print(
        f"rsembed launch: process {failed} of {len(children)} {how}{_HINTS.get(-status, '')} after "
        f"{time.monotonic() - start:.0f} s, and the others were stopped.{others} Its last lines are above; start the "
        "run again, from the latest checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    return status if status > 0 else 128 - status
