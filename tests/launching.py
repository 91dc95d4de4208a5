"""Programs that tests start in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment():
    """Environment of a child process that can import `tests` and chooses its number of devices."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # conftest.py chooses these flags.
    flags = os.environ["RSEMBED_TEST_XLA_FLAGS"]
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}


def start(program, *arguments):
    """Starts a program in two processes with two devices each. All output goes into one pipe."""
    command = [
        sys.executable,
        "-m",
        "rsembed",
        "launch",
        "--processes=2",
        "--devices-per-process=2",
        program,
    ]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def printed(run, timeout=240):
    """Everything that a run prints. The run is killed after `timeout` seconds."""
    try:
        return run.communicate(timeout=timeout)[0]
    finally:
        run.kill()
