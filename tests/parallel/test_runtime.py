"""Tests of several processes, which compute together, and stop together if one of them stops."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed import __main__ as command_line, checkpoint, parallel
from rsembed.parallel import runtime
from tests import launching

PROGRAM = Path(__file__).with_name("runtime_program.py")


class Launched:
    """A run of runtime_program.py in two processes with two devices each.

    `__init__` returns when both processes have printed their sums.
    """

    def __init__(self, *arguments):
        self.run = launching.start(PROGRAM, *arguments)
        self.output = ""
        self.pids = {}
        for line in self.run.stdout:
            self.output += line
            if match := re.match(r"\[(\d)\] sum .* pid (\d+)", line):
                self.pids[match[1]] = int(match[2])
            if len(self.pids) == 2:
                break

    def finish(self):
        return self.output + launching.printed(self.run, timeout=30)


def test_sums_over_processes_and_a_terminated_process_makes_all_save_and_leave_at_one_step(
    tmp_path,
):
    launched = Launched("preempt", tmp_path / "a")
    values = np.arange(2 * 6 * 3, dtype=np.float64).reshape(-1, 3)
    batch = np.concatenate([values, values + 1000])
    expected = re.escape(str(batch.sum(0).tolist()))
    time.sleep(0.3)
    os.kill(launched.pids["1"], signal.SIGTERM)
    output = launched.finish()
    assert launched.run.returncode == 0, output
    left = {}
    for process in "01":
        assert re.search(rf"\[{process}\] sum {expected} of \(24, 3\)", output)
        left_at = rf"\[{process}\] left at (\d+) restored True {expected}"
        left[process] = int(re.search(left_at, output)[1])
    tree, step, _ = checkpoint.load(tmp_path / "a")
    assert left["0"] == left["1"] == step > 1
    assert_array_equal(tree["table"], batch)
    assert_array_equal(tree["slots"]["0"], values[:5])
    assert_array_equal(tree["in_both"], np.arange(24).reshape(4, 6))
    assert tree["slots"]["1"] == 2.5
    assert tree["slots"]["2"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_silent_process_ends_the_run_after_the_heartbeat_timeout():
    # Both processes are in a collective, so only the missing heartbeat (after 4 s) can end the run.
    launched = Launched("stay")
    os.kill(launched.pids["1"], signal.SIGSTOP)
    output = launched.finish()
    assert launched.run.returncode == 128 + signal.SIGABRT, output
    assert re.search(r"stopped sending heartbeats\):\s+\[0\] .*\b1\b", output)
    assert "process 0 of 2 was killed by SIGABRT" in output
    assert "its message names that one" in output


@pytest.fixture
def launch(tmp_path):
    """Runs a program under `rsembed launch`."""

    def run(program, *options, arguments=()):
        script = tmp_path / "script.py"
        script.write_text(program)
        return command_line.main(["launch", *options, str(script), *arguments])

    return run


def test_launch_reports_the_first_failure(launch, capfd, monkeypatch):
    monkeypatch.setattr(runtime, "GRACE_SECONDS", 0.2)
    assert launch(FAILING, "--processes", "3") == 7
    assert re.search(r"process [12] of 3 failed with exit status 7", capfd.readouterr().err)


FAILING = """
import os, sys, time
if os.environ['RSEMBED_PROCESS_ID'] == '0': time.sleep(60)
sys.exit(7)
"""


def test_launch_names_the_killed_process_also_when_another_failed_for_it_before_it_was_seen_to_end(
    launch, capfd
):
    assert launch(KILLED) == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert "process 1 of 2 was killed by SIGKILL" in error
    assert "latest checkpoint" in error


KILLED = """
import os, signal, subprocess, sys, time
if os.environ['RSEMBED_PROCESS_ID'] == '0': time.sleep(0.5); sys.exit('a connection was closed')
subprocess.Popen(['sleep', '1.5'])  # keeps the pipe of this process open for longer than it lives
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_launch_passes_ctrl_c_on(launch, capfd):
    handler = signal.getsignal(signal.SIGINT)
    assert launch(INTERRUPTING) == 128 + signal.SIGINT
    printed = capfd.readouterr()
    assert "[1] cleaned up" in printed.out
    assert "failed" not in printed.err
    assert signal.getsignal(signal.SIGINT) is handler


INTERRUPTING = """
import os, signal, time
try:
    if os.environ['RSEMBED_PROCESS_ID'] == '1': time.sleep(0.3); os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print('cleaned up')
"""


def test_launch_hands_arguments_and_devices_to_every_process(launch, capfd):
    options = "--processes", "2", "--devices-per-process", "3"
    assert launch(TELLING, *options, arguments=("--steps", "5")) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["[0] 0 2 3 ['--steps', '5']", "[1] 1 2 3 ['--steps', '5']"]


TELLING = """
import os, sys
names = 'RSEMBED_PROCESS_ID', 'RSEMBED_NUM_PROCESSES', 'JAX_NUM_CPU_DEVICES'
print(*[os.environ[name] for name in names], sys.argv[1:])
"""


@pytest.mark.slow
def test_the_program_of_the_page_goes_on_after_a_preemption_as_if_there_had_been_none(tmp_path):
    page = (launching.ROOT / "docs" / "distributed.md").read_text()
    (tmp_path / "page.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    (tmp_path / "preempted.py").write_text(PREEMPTED)
    (tmp_path / "both.py").write_text(RESUMED_AND_TWIN)
    run = functools.partial(
        subprocess.run,
        cwd=tmp_path,
        env=launching.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    launched = run([sys.executable, "-m", "rsembed", "launch", "preempted.py"])
    assert launched.returncode == os.EX_TEMPFAIL, launched.stdout + launched.stderr
    assert "asks to be started again" in launched.stderr
    both = run([sys.executable, "both.py"])
    resumed, twin = [line for line in both.stdout.splitlines() if line.startswith("step")]
    assert resumed.startswith("step 30, loss "), both.stderr
    assert resumed == twin


PREEMPTED = """
import os, runpy, signal, time
from rsembed import parallel

preempted = parallel.preempted

def at_13(step):
    if step == 13 and os.environ["RSEMBED_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    # The processes agree within seconds, and steps take milliseconds.
    time.sleep(0.5 if step >= 13 else 0)
    return preempted(step)

parallel.preempted = at_13
runpy.run_path("page.py")
"""
RESUMED_AND_TWIN = """
import os, runpy

(step,) = (name for name in os.listdir("runs") if name.startswith("step_"))
assert "step_000000014" <= step < "step_000000030", step
runpy.run_path("page.py")
os.mkdir("twin")
os.chdir("twin")
runpy.run_path("../page.py")
"""


def test_a_task_of_slurm_that_sees_one_gpu_takes_it(alone, monkeypatch):
    arguments = []

    def initialize(address, num_processes, process_id, local_device_ids, **options):
        arguments.append(local_device_ids)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for seen in ("0", "GPU-8f6a", "0,1", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        parallel.init()
    assert arguments == [[0], [0], None, None]


@pytest.mark.slow
def test_half_an_address_and_calls_of_a_forked_process_are_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked from one that uses JAX") == 13, done.stdout
    assert re.search("init: process 0 of None at 127.0.0.1:1: .*Give all three", done.stdout)


FORKED = """
import os, signal, warnings
import jax, numpy as np
import rsembed as rs
from rsembed import checkpoint, parallel, sok, tbe, tt

try:
    # This comes first, because the error is another one when JAX has made its devices.
    parallel.init("127.0.0.1:1", process_id=0)
except ValueError as error:
    print(str(error).replace("\\n", " "))
warnings.simplefilter("ignore")  # JAX also warns of forks
table = rs.TableSpec("t", 9, 4)
collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
state = collection.init(jax.random.key(0))
batched = tbe.SplitTableBatchedEmbeddingBagsCodegen([(9, 4, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)])
trains = tt.TTEmbeddingBag(1000, 16, tt_ranks=[4])
plain = tbe.SplitTableBatchedEmbeddingBagsCodegen([(9, 4, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU)])
caching = (9, 4, tbe.EmbeddingLocation.MANAGED_CACHING, tbe.ComputeDevice.CPU)
cached = tbe.SplitTableBatchedEmbeddingBagsCodegen([caching])
backwards = [module.vjp(np.arange(3), np.asarray([0, 3]))[1] for module in (plain, cached)]
gradient = np.ones((1, 4), np.float32)
sok.Init()
layer = sok.DistributedEmbedding("sum", 9, 4, slot_num=1, max_nnz=2)
calls = [
    lambda: collection.lookup(state, {"f": [[1]]}),
    lambda: checkpoint.save("never", state),
    lambda: batched(np.arange(3), np.asarray([0, 3])),
    lambda: trains(np.arange(3), np.asarray([0, 3])),
    lambda: layer(np.zeros((1, 1, 1), int)),
    lambda: backwards[0](gradient),
    lambda: backwards[1](gradient),
    lambda: backwards[0].row_gradients(gradient),
    plain.state_dict,
    cached.state_dict,
    cached.flush,
    lambda: cached.reset_cache_states(discard=True),
    lambda: cached.prefetch(np.arange(3), np.asarray([0, 3])),
]
if (child := os.fork()) == 0:
    signal.alarm(60)
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
os._exit(os.waitpid(child, 0)[1])
"""


# One process


@pytest.fixture
def alone(monkeypatch):
    """Deletes environment variables of clusters, and afterwards restores settings."""
    for name in list(os.environ):
        if name.startswith(("RSEMBED_", "JAX_", "SLURM_", "OMPI_", "KUBERNETES_", "TPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(runtime, "_watches_preemption", False)
    handler, service = signal.getsignal(signal.SIGTERM), jax.config.jax_enable_preemption_service
    yield
    signal.signal(signal.SIGTERM, handler)
    jax.config.update("jax_enable_preemption_service", service)
    runtime._terminated.clear()


def test_one_process_needs_nothing_and_notices_sigterm(alone):
    parallel.init()
    parallel.init(preemption=True)
    assert not jax.distributed.is_initialized()
    assert not parallel.preempted(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert parallel.preempted(2)


def test_a_late_start_is_an_error_where_others_wait(alone, monkeypatch):
    jax.devices()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    message = r"JAX has already made its devices; call init\(\) before any array"
    with pytest.raises(RuntimeError, match=message):
        parallel.init()
    monkeypatch.setenv("RSEMBED_NUM_PROCESSES", "1")
    parallel.init()


def test_a_number_of_processes_that_is_none_is_refused(alone, monkeypatch):
    monkeypatch.setenv("RSEMBED_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match=r"RSEMBED_NUM_PROCESSES .* must be a number, got 'two'"):
        parallel.init()


def test_waiting_for_others_that_never_come_is_explained(alone, monkeypatch, caplog):
    def wait(*arguments, **options):
        time.sleep(1.5)
        # JAX itself ends the process here.
        raise RuntimeError("deadline exceeded")

    monkeypatch.setattr(jax.distributed, "initialize", wait)
    with pytest.raises(RuntimeError, match="process 1 of 2 at host:1: deadline exceeded"):
        parallel.init("host:1", num_processes=2, process_id=1, initialization_timeout_seconds=1)
    warning = "process 1 of 2 at host:1 still waits for the others, and will be ended after 1 s"
    assert warning in caplog.text


def test_meshes_have_auto_axes():
    """JAX refuses to index a sharded table with an explicit axis outside `shard_map`."""
    mesh = parallel.make_mesh("data", 4)
    assert mesh.shape == {"data": 4}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)
