"""Processes find each other, compute together, and leave together: when told to, and when one of them dies."""

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
    """A run of runtime_program.py in two processes with two devices each, from the time that both have computed."""

    def __init__(self, *arguments):
        self.run = launching.start(PROGRAM, *arguments)
        self.lines, self.pids = [], {}
        for line in self.run.stdout:
            self.lines.append(line)
            if found := re.match(r"\[(\d)\] sum .* pid (\d+)", line):
                self.pids[int(found[1])] = int(found[2])
            if len(self.pids) == 2:
                break

    def finish(self, timeout):
        return "".join(self.lines) + launching.printed(self.run, timeout)


def test_sums_over_processes_and_a_terminated_process_makes_all_save_and_leave_at_one_step(
    tmp_path,
):
    launched = Launched("preempt", tmp_path / "a")
    own = np.arange(2 * 6 * 3, dtype=np.float64).reshape(-1, 3)
    batch = np.concatenate([own, own + 1000])
    expected = batch.sum(0).tolist()
    time.sleep(0.3)
    os.kill(launched.pids[1], signal.SIGTERM)
    output = launched.finish(timeout=30)
    assert launched.run.returncode == 0, output
    for process in range(2):
        assert f"[{process}] sum {expected} of (24, 3)" in output
        assert re.search(
            rf"\[{process}\] left at \d+ restored True {re.escape(str(expected))}", output
        )
    left = dict(re.findall(r"\[(\d)\] left at (\d+)", output))
    assert left["0"] == left["1"] and int(left["0"]) > 1
    tree, step, _ = checkpoint.load(tmp_path / "a")
    assert step == int(left["0"])
    assert_array_equal(tree["table"], batch)
    assert_array_equal(tree["slots"]["0"], own[:5])
    assert_array_equal(tree["in_both"], np.arange(24).reshape(4, 6))
    assert tree["slots"]["1"] == 2.5 and tree["slots"]["2"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_silent_process_ends_the_run_after_the_heartbeat_timeout():
    # Inside a collective, where only the missing heartbeat (4 s) can end the wait.
    launched = Launched("stay")
    os.kill(launched.pids[1], signal.SIGSTOP)
    output = launched.finish(timeout=30)
    assert launched.run.returncode == 128 + signal.SIGABRT, output
    assert re.search(r"stopped sending heartbeats\):\s+\[0\] .*\b1\b", output)
    assert (
        "process 0 of 2 was killed by SIGABRT" in output and "its message names that one" in output
    )


def test_launch_reports_the_first_failure(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(runtime, "GRACE_SECONDS", 0.2)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RSEMBED_PROCESS_ID'] == '0': time.sleep(60)\nsys.exit(7)\n"
    )
    assert command_line.main(["launch", "--processes", "3", str(script)]) == 7
    assert re.search(r"process [12] of 3 failed with exit status 7", capfd.readouterr().err)


def test_launch_names_the_killed_process_also_when_another_failed_for_it_before_it_was_seen_to_end(
    tmp_path, capfd
):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "if os.environ['RSEMBED_PROCESS_ID'] == '0': time.sleep(0.5); sys.exit('a connection was closed')\n"
        "subprocess.Popen(['sleep', '1.5'])  # keeps the pipe of this process open for longer than it lives\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert command_line.main(["launch", str(script)]) == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert "process 1 of 2 was killed by SIGKILL" in error and "latest checkpoint" in error


def test_launch_passes_ctrl_c_on(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "try:\n"
        "    if os.environ['RSEMBED_PROCESS_ID'] == '1': time.sleep(0.3); os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('cleaned up')\n"
    )
    handler = signal.getsignal(signal.SIGINT)
    assert command_line.main(["launch", str(script)]) == 128 + signal.SIGINT
    printed = capfd.readouterr()
    assert "[1] cleaned up" in printed.out and "failed" not in printed.err
    assert signal.getsignal(signal.SIGINT) is handler


def test_launch_hands_arguments_and_devices_to_every_process(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "names = 'RSEMBED_PROCESS_ID', 'RSEMBED_NUM_PROCESSES', 'JAX_NUM_CPU_DEVICES'\n"
        "print(*[os.environ[name] for name in names], sys.argv[1:])\n"
    )
    arguments = [
        "launch",
        "--processes",
        "2",
        "--devices-per-process",
        "3",
        str(script),
        "--steps",
        "5",
    ]
    assert command_line.main(arguments) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["[0] 0 2 3 ['--steps', '5']", "[1] 1 2 3 ['--steps', '5']"]


@pytest.mark.slow
def test_the_program_of_the_page_goes_on_after_a_preemption_as_if_there_had_been_none(tmp_path):
    page = (launching.ROOT / "docs" / "distributed.md").read_text()
    (tmp_path / "page.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    (tmp_path / "preempted.py").write_text(PREEMPTED)
    (tmp_path / "both.py").write_text(RESUMED_AND_TWIN)
    options = {
        "cwd": tmp_path,
        "env": launching.environment(),
        "capture_output": True,
        "text": True,
        "timeout": 240,
    }
    launched = subprocess.run(
        [sys.executable, "-m", "rsembed", "launch", "preempted.py"], **options
    )
    assert launched.returncode == os.EX_TEMPFAIL, launched.stdout + launched.stderr
    assert "asks to be started again" in launched.stderr
    both = subprocess.run([sys.executable, "both.py"], **options)
    resumed, twin = [line for line in both.stdout.splitlines() if line.startswith("step")]
    assert resumed.startswith("step 30, loss ") and resumed == twin, both.stdout + both.stderr


PREEMPTED = """
import os, runpy, signal, time
from rsembed import parallel

preempted = parallel.preempted

def at_13(step):
    if step == 13 and os.environ["RSEMBED_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5 if step >= 13 else 0)  # the processes agree within seconds, steps take milliseconds
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
    given = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *arguments, **options: given.append(arguments[3])
    )
    for seen in ("0", "GPU-8f6a", "0,1", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        parallel.init()
    assert given == [[0], [0], None, None]


def test_half_an_address_and_calls_of_a_forked_process_are_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.count("forked from one that uses JAX") == 13, (
        done.stdout + done.stderr
    )
    assert re.search("init: process 0 of None at 127.0.0.1:1: .*Give all three", done.stdout), (
        done.stdout
    )


FORKED = """
import os, signal, warnings
import jax, numpy as np
import rsembed as rs
from rsembed import checkpoint, parallel, sok, tbe, tt

try:
    parallel.init("127.0.0.1:1", process_id=0)  # before JAX makes its devices, of which it would speak first
except ValueError as error:
    print(str(error).replace("\\n", " "))
warnings.simplefilter("ignore")  # of JAX, which says the same
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
    """No cluster around, and afterwards the signal handler and the settings of before."""
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
    with pytest.raises(
        RuntimeError, match="JAX has already made its devices; call init\\(\\) before any array"
    ):
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
        raise RuntimeError("deadline exceeded")  # JAX aborts here

    monkeypatch.setattr(jax.distributed, "initialize", wait)
    with pytest.raises(RuntimeError, match="process 1 of 2 at host:1: deadline exceeded"):
        parallel.init("host:1", num_processes=2, process_id=1, initialization_timeout_seconds=1)
    assert (
        "process 1 of 2 at host:1 still waits for the others, and will be ended after 1 s"
        in caplog.text
    )


def test_meshes_have_auto_axes():
    mesh = parallel.make_mesh("data", 4)
    assert mesh.shape == {"data": 4} and mesh.axis_types == (jax.sharding.AxisType.Auto,)
    table = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    split = jax.device_put(table, jax.NamedSharding(mesh, jax.P("data")))
    # Indexing a sharded table works outside shard_map, which an Explicit axis would refuse.
    assert_array_equal(split[np.array([5, 0])], table[[5, 0]])
