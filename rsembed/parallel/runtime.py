"""Starts, connects and ends the processes of a run, with any number of devices and processes.

```
init()  ─▶  mesh = make_mesh()  ─▶  your jitted step  ─▶  preempted(step): save and leave
```

`init` detects how the processes of a run can connect, so a script needs no addresses and no
process numbers. The page docs/distributed.md shows how to start runs. `launch` starts several
processes on this machine, to test a script for Slurm, Kubernetes or a TPU pod.
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
_LAUNCHERS = (
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "KUBERNETES_SERVICE_HOST",
    "TPU_WORKER_HOSTNAMES",
)
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
    """Connects this process with the other processes of its run.

    Call `init` before the first JAX array is created.

    Missing arguments are read from the environment variables `RSEMBED_COORDINATOR_ADDRESS`,
    `RSEMBED_NUM_PROCESSES` and `RSEMBED_PROCESS_ID` (or the same names with `JAX_`). If arguments
    and environment variables are missing, `jax.distributed` detects the processes (Slurm, Open MPI,
    Kubernetes, TPU pods). If the run has only one process, or if `init` was called before, `init`
    makes no connection.

    If a process dies, JAX aborts the other processes after `heartbeat_timeout_seconds` and names
    the dead process, because the other processes would wait forever in a collective. A process with
    an uncaught exception exits at once. A process that reaches the end of the script waits for the
    other processes.

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: number of processes of the run. If `num_processes` is 1, the process connects
        to no other process, even if environment variables describe a larger run.
      process_id: index of this process, from 0.
      local_device_ids: indices of the accelerators that this process may use. None: all visible
        accelerators, or the accelerators that the cluster assigns to this process.
      preemption: whether a SIGTERM means that the run will lose its machine and should save, see
        `preempted`. False by default: SIGTERM ends the process.
      heartbeat_timeout_seconds: a process counts as dead if it sends no heartbeat for this number
        of seconds. Increase the default of 30 if long compilations or slow file systems can delay
        heartbeats.
      initialization_timeout_seconds: number of seconds to wait for the other processes. If the
        other processes do not connect in time, JAX aborts this process. After 80 % of
        `initialization_timeout_seconds`, `init` logs a warning with the address and the number of
        processes, as far as they are known.
      shutdown_timeout_seconds: number of seconds that a finished process waits for the other
        processes.

    Raises:
      ValueError: only one or two of `coordinator_address`, `num_processes` and `process_id` are
        known, a number is out of range, or a timeout is below 1.
      RuntimeError: JAX has already been used, `jax.distributed` could not start, or a second call
        has the arguments of a different run.
    """
    global _watches_preemption
    timeouts = {
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "initialization_timeout": initialization_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
    }
    address = coordinator_address or _environment("COORDINATOR_ADDRESS")
    if num_processes is None:
        num_processes = _environment_int("NUM_PROCESSES")
    if process_id is None:
        process_id = _environment_int("PROCESS_ID")
    if jax.distributed.is_initialized():
        running_count = jax.process_count()
        running_id = jax.process_index()
        is_same_run = num_processes in (None, running_count) and process_id in (None, running_id)
        if not is_same_run:
            raise RuntimeError(
                f"init: this is process {running_id} of {running_count} already; it cannot become "
                f"process {process_id} of {num_processes}. Call init() once, with the arguments of "
                "the run."
            )
    else:
        # The default of `jax_enable_preemption_service` depends on the version of JAX, so `init`
        # always sets this option.
        jax.config.update("jax_enable_preemption_service", preemption)
        if num_processes != 1:
            _connect(address, num_processes, process_id, local_device_ids, timeouts)
        if jax.distributed.is_initialized():
            atexit.register(_leave)
            _log.info("process %d of %d", jax.process_index(), jax.process_count())
    if preemption and not _watches_preemption:
        if not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, lambda number, frame: _terminated.set())
        _watches_preemption = True


def _environment(name: str) -> str | None:
    return os.environ.get(f"RSEMBED_{name}") or os.environ.get(f"JAX_{name}")


def _environment_int(name: str) -> int | None:
    text = _environment(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"init: RSEMBED_{name} (or JAX_{name}) must be a number, got {text!r}.")
    if text is None:
        return None
    return int(text)


def _connect(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    timeouts: dict[str, Any],
) -> None:
    """Connects to the other processes of the run, if there are any."""
    is_requested = not (address is None and num_processes is None and process_id is None)
    who = "init: this process"
    if is_requested:
        who = f"init: process {process_id} of {num_processes} at {address}"
    # A timer logs a warning before the initialization timeout, because JAX aborts the process at
    # the timeout without raising an exception.
    timeout = timeouts["initialization_timeout"]
    warning = (
        f"{who} still waits for the others, and will be ended after {timeout} s. Are all of them "
        "running, with the same address and number of processes? Can they reach each other?"
    )
    timer = threading.Timer(0.8 * timeout, _log.warning, [warning])
    timer.daemon = True
    timer.start()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES", ""))
    if local_device_ids is None and visible and "," not in visible:
        # By default, JAX uses the index of a Slurm task as the index of the GPU. With Slurm's
        # --gpus-per-task=1, each task sees only one GPU, which has index 0.
        local_device_ids = [0]
    try:
        jax.distributed.initialize(address, num_processes, process_id, local_device_ids, **timeouts)
    except ValueError as error:
        if not is_requested and "coordinator_address" in str(error):  # JAX detected no cluster.
            return
        raise ValueError(
            f"{who}: {error} Give all three (or set RSEMBED_COORDINATOR_ADDRESS, "
            "RSEMBED_NUM_PROCESSES and RSEMBED_PROCESS_ID), or start the script with "
            "`python -m rsembed launch`."
        ) from error
    except RuntimeError as error:
        reason = str(error)
        if "must be called before" in reason:
            has_launcher = any(name in os.environ for name in _LAUNCHERS)
            if not is_requested and not has_launcher:
                return  # This process runs alone, for example in a notebook.
            reason = "JAX has already made its devices; call init() before any array"
        way_out = "A single process needs no init, or init(num_processes=1)"
        raise RuntimeError(f"{who}: {reason}. {way_out}.") from error
    finally:
        timer.cancel()


def _leave() -> None:
    """Tells the other processes that this process ends, and exits at once after an error.

    At exit, JAX waits for the other processes. If this process has failed, the other processes may
    be waiting for this process, so `_leave` does not wait for them.
    """
    say_goodbye()
    if getattr(sys, "last_value", None) is not None:
        process = f"process {jax.process_index()} of {jax.process_count()}"
        print(
            f"rsembed: {process} ends the run: {type(sys.last_value).__name__}, see above. If it "
            "speaks of a peer or of a connection, another process died first: look there, then start "
            "again from the latest checkpoint.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def preempted(step: int) -> bool:
    """True if the run should save and exit now, because a process received SIGTERM.

    In a run with several processes, `preempted` returns True at exactly one step after the SIGTERM,
    the same step in all processes. In a run with one process, `preempted` returns True at every
    step after the SIGTERM.

    Args:
      step: index of the current training step. Every process must call `preempted` once per step,
        with increasing indices.

    Raises: RuntimeError: `init(preemption=True)` was not called.
    """
    if not _watches_preemption:
        way_out = "call init(preemption=True) first"
        raise RuntimeError(f"preempted: nobody listens for SIGTERM; {way_out}.")
    if jax.distributed.is_initialized():
        return bool(multihost_utils.reached_preemption_sync_point(step))
    return _terminated.is_set()


@validated
def make_mesh(axis: str = "shard", num_devices: int | None = None) -> Mesh:
    """A mesh with one axis, over the devices of all processes, for sharded tables and batches.

    The type of the mesh axis is `Auto`. By default, `jax.make_mesh` makes `Explicit` axes.
    Outside `shard_map`, ids cannot index an array that is sharded over an `Explicit` axis.

    Args:
      axis: name of the axis.
      num_devices: number of devices in the mesh, by default all devices. Every process contributes
        the same number of devices.

    Raises: ValueError: there are too few devices, or the processes cannot contribute equal numbers
      of devices.
    """
    provide_threads()
    devices = jax.devices()
    num_processes = jax.process_count()
    if num_devices is not None:
        devices = []
        for process in range(num_processes):
            devices += jax.local_devices(process)[: num_devices // num_processes]
        if num_devices < 1 or len(devices) != num_devices:
            raise ValueError(
                f"make_mesh: {num_devices} devices cannot be taken equally from {num_processes} "
                f"processes with {jax.device_count()} devices in all; for more CPU devices set "
                "JAX_NUM_CPU_DEVICES, or use `python -m rsembed launch --devices-per-process`."
            )
    mesh = Mesh(np.asarray(devices), (axis,), axis_types=(AxisType.Auto,))
    check_threads(mesh)
    return mesh


# `launch` and its helper functions run a script in several processes on this machine.

GRACE_SECONDS = 3.0
"""Time in seconds for processes to end by themselves after one of them fails, or after Ctrl-C."""
_POLL_SECONDS = 0.05
# A script that was preempted exits with this status, so that the scheduler starts it again.
_START_AGAIN = getattr(os, "EX_TEMPFAIL", 75)
_HINTS: dict[int, str] = {
    -_START_AGAIN: " (so a script that was preempted asks to be started again)",
    getattr(signal, "SIGKILL", 9): " (so the system ends a process when memory runs out)",
    signal.SIGABRT: " (so JAX ends a process when another fell silent; its message names that one)",
}
_FAKE_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*")


@validated
def launch(
    script: str,
    arguments: Sequence[str] = (),
    *,
    num_processes: PositiveInt = 2,
    devices_per_process: PositiveInt = 1,
) -> int:
    """Runs a script in several processes with separate CPU devices, until all end or one fails.

    Each line of output starts with the index of the process that wrote it. If a process fails, the
    other processes have `GRACE_SECONDS` to end, and are then killed, because they would wait for
    the failed process forever. A message on standard error says which process failed, how it
    failed, and what to do. Ctrl-C and SIGTERM are passed on to the processes. A second Ctrl-C kills
    the processes.

    Args:
      script: path of a Python file that calls `rsembed.parallel.init()`.
      arguments: arguments of the script.
      num_processes: number of processes to start.
      devices_per_process: number of CPU devices of each process.

    Returns: exit status of the run. 0 if all processes succeed, else the exit status of the process
      that caused the failure. The exit status of a process that a signal killed is 128 plus the
      signal number. After Ctrl-C, or if a process fails after SIGTERM, the run exits with 128 plus
      the number of the signal that `launch` received. If a preempted script exits with status 75,
      the run exits with 75, even after a signal.

    Raises: ValueError: a count is below 1, or the script does not exist.
    """
    if not os.path.isfile(script):
        raise ValueError(f"launch: there is no script {script!r}.")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # Port 0 stands for a free port that the system chooses.
        _, port = probe.getsockname()
    address = f"127.0.0.1:{port}"
    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    received: list[int] = []
    ended: list[int] = []  # Processes that have ended, in the order in which they ended.

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        for child in children:
            if received.count(signal.SIGINT) > 1:
                child.kill()
            else:
                child.send_signal(number)

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, pass_on)
    try:
        for process in range(num_processes):
            child = subprocess.Popen(
                [sys.executable, script, *arguments],
                env=_environment_of(process, num_processes, devices_per_process, address),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal does not reach a process in a new session, so the process
                # receives it only once, from `pass_on`.
                start_new_session=True,
            )
            children.append(child)
            reader = threading.Thread(target=_follow, args=(process, child, ended))
            readers.append(reader)
            reader.start()
        return _wait(children, ended, received)
    finally:
        for child in children:
            child.kill()
        for reader in readers:
            reader.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _environment_of(
    process: int,
    num_processes: int,
    num_devices: int,
    address: str,
) -> dict[str, str]:
    """Environment variables of a process that `launch` starts."""
    changed = {
        "RSEMBED_COORDINATOR_ADDRESS": address,
        "RSEMBED_NUM_PROCESSES": str(num_processes),
        "RSEMBED_PROCESS_ID": str(process),
        # By default, JAX would accept connections from the whole network.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_FLAGS": _FAKE_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")).strip(),
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | changed | thread_settings(num_devices)


def _follow(process: int, child: subprocess.Popen[bytes], ended: list[int]) -> None:
    """Prints the output of a process line by line, until the process has ended."""
    with cast(IO[bytes], child.stdout) as lines:
        for line in lines:
            # One call of `write` writes a whole line, so that lines of different processes do not
            # mix.
            sys.stdout.write(f"[{process}] {line.decode(errors='replace').rstrip()}\n")
            sys.stdout.flush()
    child.wait()
    ended.append(process)


def _wait(
    children: Sequence[subprocess.Popen[bytes]],
    ended: Sequence[int],
    received: Sequence[int],
) -> int:
    """Waits until all processes have ended or one has failed, and returns the run's exit status.

    After a failure or Ctrl-C, `_wait` gives the running processes up to `GRACE_SECONDS` to end.

    Args:
      children: all processes that `launch` started.
      ended: indices of the processes that have ended, in the order in which they ended. The threads
        that run `_follow` append to `ended`.
      received: list of the signals that this process has received. The signal handler of `launch`
        appends to `received`.
    """
    start = time.monotonic()
    deadline = None
    while True:
        all_failed = [process for process in ended if children[process].returncode]
        failed = _first_failure(children, all_failed)
        # After SIGTERM there is no deadline, because a script may take time to save a checkpoint.
        if deadline is None and (failed is not None or signal.SIGINT in received):
            deadline = time.monotonic() + GRACE_SECONDS
        is_late = deadline is not None and time.monotonic() > deadline
        if len(ended) == len(children) or is_late:
            break
        time.sleep(_POLL_SECONDS)
    status = 0
    if failed is not None:
        status = children[failed].returncode
    if received and status != _START_AGAIN:
        if failed is None and signal.SIGINT not in received:
            return 0
        return 128 + received[0]
    if failed is None:
        return 0
    also_failed = ""
    for process in all_failed:
        if process != failed:
            also_failed += f" Process {process} failed, too."
    how = f"failed with exit status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    seconds = time.monotonic() - start
    print(
        f"rsembed launch: process {failed} of {len(children)} {how}{_HINTS.get(-status, '')} after "
        f"{seconds:.0f} s, and the others were stopped.{also_failed} Its last lines are above; start "
        "the run again, from the latest checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    if status < 0:
        return 128 - status
    return status


def _first_failure(
    children: Sequence[subprocess.Popen[bytes]],
    all_failed: Sequence[int],
) -> int | None:
    """Index of the process that made the other processes fail, or None if no process has failed.

    If a signal other than SIGABRT killed a process, the result is the first process that such a
    signal killed, even if another process failed earlier. The system closes the connections of a
    killed process before the process ends, so other processes may fail before the killed process
    has ended. SIGABRT is an exception, because JAX aborts a process by SIGABRT if a different
    process stops responding. If no signal other than SIGABRT killed a process, the result is the
    first process that failed.
    """
    for process in all_failed:
        status = children[process].returncode
        if status < 0 and status != -signal.SIGABRT:
            return process
    if all_failed:
        return all_failed[0]
    return None
