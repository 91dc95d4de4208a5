"""Programs that tests start in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment():
    """Of a child that finds `tests`, and makes no devices but its own."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # See conftest.py.
    return os.environ | {
        "XLA_FLAGS": os.environ["RSEMBED_TEST_XLA_FLAGS"],
        "PYTHONPATH": paths,
    }


def start(program, *arguments):
    """The program in two processes with two devices each, which print and complain into one pipe."""
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
    """What a run prints until it ends; one that does not end in so many seconds is killed."""
    try:
        return run.communicate(timeout=timeout)[0]
    finally:
        run.kill()
