"""`python -m rsembed launch`: a script in several processes on this machine, to try what a cluster will run.

The processes find each other through the environment variables that `rsembed.parallel.init` reads, so the script is
the one that Slurm, Kubernetes or a TPU pod starts.
"""

from __future__ import annotations

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

from rsembed.checks import PositiveInt, validated
from rsembed.kernels import devices

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
                env=_environment(process, num_processes, devices_per_process, address),
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


def _environment(process: int, num_processes: int, num_devices: int, address: str) -> dict[str, str]:
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
    return os.environ | own | devices.thread_settings(num_devices)


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
