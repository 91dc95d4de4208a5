"""Tests of commands and environment variables in the files for clusters in docs/examples."""

import contextlib
import os
import socket
import stat
import subprocess
import sys

import pytest

from rsembed.parallel.runtime import _environment_of
from tests import launching

EXAMPLES = launching.ROOT / "docs" / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples come with a checkout")

SCRIPT = """
import os, sys, jax
from jax.experimental import multihost_utils
from rsembed import parallel

parallel.init(preemption=True)
numbers = multihost_utils.process_allgather(jax.numpy.arange(1) + jax.process_index())
line = f"process {jax.process_index()} of {jax.process_count()} {numbers.ravel().tolist()} {sys.argv[1:]}\\n"
os.write(1, line.encode())  # in one piece: both processes write here
"""

# Takes the place of `srun`: starts two tasks with the environment variables that Slurm sets.
SRUN = """
import os, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
of_all = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
tasks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | of_all | {"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)})
    for k in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


def free_port(candidates):
    for port in candidates:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return probe.getsockname()[1]
    pytest.skip("none of the ports is free")


@pytest.mark.slow
def test_processes_that_slurm_starts_by_the_batch_file_find_each_other(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    srun = tmp_path / "srun"
    srun.write_text(f"#!{sys.executable}\n{SRUN}")
    srun.chmod(srun.stat().st_mode | stat.S_IEXEC)
    # JAX computes one of the last 4,096 ports from the number of the job.
    first = 65535 - 2**12 + 1
    job = free_port(range(first, 65535)) - first
    environment = launching.environment() | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_JOB_ID": str(job),
    }
    command = ["bash", EXAMPLES / "train.slurm", tmp_path / "script.py", "STEPS=3"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    # The runtime prints lines, too.
    said = sorted(line for line in run.stdout.splitlines() if line.startswith("process"))
    assert said == [f"process {process} of 2 [0, 1] ['STEPS=3']" for process in range(2)]


def test_pods_of_the_indexed_job_are_told_what_launch_tells_its_processes(monkeypatch):
    yaml = pytest.importorskip("yaml")
    for name in [name for name in os.environ if name.startswith("RSEMBED_")]:
        monkeypatch.delenv(name)
    service, job = yaml.safe_load_all((EXAMPLES / "train.kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    host, _, port = variables["RSEMBED_COORDINATOR_ADDRESS"].partition(":")
    job_name = job["metadata"]["name"]
    assert int(port)
    assert host == f"{job_name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"]["job-name"] == job_name
    num_processes = int(variables["RSEMBED_NUM_PROCESSES"])
    assert num_processes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert container["command"] == ["python", "script.py"]
    environment = _environment_of(0, 4, 1, "")
    assert variables.keys() == {name for name in environment if name.startswith("RSEMBED_")}
