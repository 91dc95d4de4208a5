"""All that is to be known of rsembed on a GPU, in 25 minutes: one JSON file and one page.

    python benchmarks/card.py --out results [--minutes 25] [--stages machine,kernels] [--tiny]
    python benchmarks/card.py --wheels [--have pip-list.txt]

Made for a bare machine with Python 3.12, jax 0.11.2 and CUDA 13, and no network; `--wheels` prints what to carry there.
Stages run one after the other in processes of their own, the most telling first. Each has a time limit, and a log in
the folder; one that fails or runs out of time is recorded as such, and the next goes on. `results.json` and
`results.md` are written again after every stage, so a run that is cut off leaves what it measured. Called again with
the same folder, it goes on with stages that have not passed. `--tiny` runs every stage on CPUs at sizes that check the
script, in some minutes: the page then says that its numbers tell nothing of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import card_page
import card_wheels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEAST_SECONDS = 15  # a stage that has less left is not begun

# Tests whose numbers come from a device. Not here: those of several devices (meshes, exchanges, the SparseCore wing),
# which one card cannot run, and of what never reaches a device (files, text, pictures, native CPU kernels).
SUITE = (
    *("tests/kernels/test_api.py", "tests/kernels/test_jagged.py", "tests/test_row_gradients.py"),
    *("tests/collection/test_embeddings.py", "tests/homes/test_contract.py", "tests/homes/test_corners.py"),
    *("tests/optimizers/test_contract.py", "tests/tbe/test_module.py", "tests/tbe/test_rounding.py"),
    *("tests/tt/test_cores.py", "tests/tt/test_storage.py", "tests/kernels/test_keys.py"),
)
# By the reason.
DESELECTED = {
    "needs several devices": (
        "tests/collection/test_embeddings.py::test_a_prepared_batch_stays_though_its_memory_is_written_again[2]",
        "tests/homes/test_contract.py::test_a_home_on_a_way_gives_the_numbers_of_loops[hashed, evicting-row",
        "tests/homes/test_contract.py::test_rules_of_whole_rows_are_refused_on_columns_by_name",
        "tests/homes/test_corners.py::test_what_a_storage_cannot_promise_is_refused",
    ),
    "is about native CPU kernels": (
        "tests/homes/test_corners.py::test_a_compiled_step_holds_one_copy_of_a_hashed_table",
    ),
}
# jax warns so from 0.11 on wherever our kernels are traced, and under the suite warnings are errors.
NO_WARNING = ("-W", "ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
# A card multiplies float32 matrices in TF32 by default, three digits; the suite's tolerances are those of float32.
SUITE_ENVIRONMENT = {"RSEMBED_TEST_GPU": "1", "RSEMBED_TEST_XLA_FLAGS": "", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
OUTCOME = re.compile(rf"(?:^|\s)({WORDS})\s+(tests/\S.*?)\s*$|^(tests/\S.*?) ({WORDS})")


class Stage(NamedTuple):
    """One thing to find out.

    Args:
      proves: what a passed stage shows, for the page.
      seconds: its time limit.
      arguments: of Python.
      environment: added to that of this process.
      kind: where its records come from: "records" writes a file of them, "tests" and "notebook" are read from the log.
    """

    proves: str
    seconds: int
    arguments: Sequence[str]
    environment: Mapping[str, str] = MappingProxyType({})
    kind: str = "records"


def computed(name: str, seconds: int, proves: str) -> Stage:
    """A stage of `card_stages.py`."""
    return Stage(proves, seconds, [str(HERE / "card_stages.py"), name])


def suite(kernels: str, seconds: int, proves: str, *, tiny: bool) -> Stage:
    """The suite's tests that one card can run."""
    files = ["tests/kernels/test_api.py", "tests/test_row_gradients.py"] if tiny else SUITE
    arguments = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", *NO_WARNING, *files]
    if not tiny:
        arguments += ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist=loadfile"]
    arguments += [f"--deselect={name}" for names in DESELECTED.values() for name in names]
    environment = SUITE_ENVIRONMENT | ({"RSEMBED_KERNELS": kernels} if kernels else {})
    if tiny and kernels:
        arguments += ["-p", "tests.kernels.as_on_gpu"]
    return Stage(proves, seconds, arguments, environment, "tests")


def notebook(name: str, kernels: str, seconds: int, proves: str) -> Stage:
    """A tutorial with its own parameters and assertions."""
    environment = {"RSEMBED_KERNELS": kernels} if kernels else {}
    return Stage(proves, seconds, ["-m", "rsembed", "run", name], environment, "notebook")


def stages(*, tiny: bool) -> dict[str, Stage]:
    """All stages in the order of what they tell a minute; their limits add up to 25 minutes."""
    tests = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "tests/kernels/test_gpu.py"]
    every_kernel = "the kernels' numbers on this card agree with loops over numpy and repeat bit by bit; they compile"
    of = {
        "A": "8 x 100k x 64, batch 20480, 20 uniform ids",
        "B": "26 x 100k x 128, batch 10240, 1 uniform id",
        "C": "1 x 10M x 64, batch 40960, 20 uniform ids",
        "D": "as A, Zipf 1.15",
        "T": "32 x 1M x 128, batch 8192, 20 uniform ids",
    }
    timed = {
        f"workload_{letter}": computed(f"workload_{letter}", 60 if letter != "T" else 90, f"times beside peers: {what}")
        for letter, what in of.items()
    }
    largest = timed.pop("workload_T")
    tests += ["-k", "weights_of or places or entries_without"] if tiny else []
    environment = {} if tiny else SUITE_ENVIRONMENT
    return {
        "machine": computed("machine", 45, "which card, driver and versions; what a copy moves"),
        "kernels": Stage(every_kernel, 180, tests, environment, "tests"),
        "in_place": computed("in_place", 60, "steps of donated tables of 8 GiB copy none of them"),
        **timed,
        "quickstart": notebook("00_quickstart", "", 60, "the quickstart trains on the card"),
        "quickstart_kernels": notebook("00_quickstart", "gpu", 60, "the quickstart trains with the kernels"),
        "suite_reference": suite("", 200, "the suite passes on the card with the reference", tiny=tiny),
        "suite_kernels": suite("gpu", 200, "the suite passes on the card with the kernels", tiny=tiny),
        "homes": computed(
            "homes", 90, "hashed and cached tables and tensor trains train, with and without the kernels"
        ),
        "workload_T": largest,
        "shakespeare": notebook("01_shakespeare", "", 120, "the Shakespeare tutorial trains on the card"),
        "tiling": computed("tiling", 140, "which cut of a program's work is fastest"),
    }


def run_stage(name: str, stage: Stage, seconds: float, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """What became of a stage; its log and records lie in `folder`."""
    log, records = folder / f"{name}.log", folder / f"{name}.records.json"
    arguments = list(stage.arguments)
    if stage.kind == "records":
        arguments += ["--records", str(records), *(["--tiny"] if tiny else [])]
    if stage.kind == "notebook":
        arguments += ["--output", str(folder / "executed")]
    environment = os.environ | {
        # Torch and the processes of the suite want memory of the same card.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
        "MPLBACKEND": "Agg",
        **({"JAX_PLATFORMS": "cpu"} if tiny else {}),
        **stage.environment,
    }
    if importlib.util.find_spec("rsembed") is None:  # not installed: the sources beside this script serve
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    records.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "out of time"
        finally:
            stop(process)
    text = log.read_text(errors="replace")
    found = {"state": state, "seconds": round(time.monotonic() - start, 1), "limit_seconds": round(seconds)}
    found |= {"command": " ".join(["python", *stage.arguments]), "environment": dict(stage.environment)}
    if stage.kind == "records":
        found["records"] = json.loads(records.read_text()) if records.exists() else []
        records.unlink(missing_ok=True)
    elif stage.kind == "tests":
        found |= outcomes(text)
    else:
        found["printed"] = [line.strip() for line in text.splitlines() if line.startswith("  ")][-12:]
    if state != "passed":
        found["log_tail"] = text[-3000:]
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a stage with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcomes(log: str) -> dict[str, Any]:
    """How many tests did what, and which failed, from what pytest printed; also if it was stopped halfway."""
    by_name: dict[str, str] = {}
    for line in log.splitlines():
        if match := OUTCOME.search(line):
            outcome, name = (match[1], match[2]) if match[1] else (match[4], match[3])
            by_name[re.sub(r" - .*$", "", name)] = outcome
    counts = {outcome: list(by_name.values()).count(outcome) for outcome in sorted(set(by_name.values()))}
    failed = sorted(name for name, outcome in by_name.items() if outcome in ("FAILED", "ERROR"))
    return {"counts": counts, "failed": failed, "reasons": re.findall(r"^E   .*$", log, re.MULTILINE)[:60]}


def write(folder: Path, results: dict[str, Any]) -> None:
    """Both files, each in one piece."""
    for name, text in (("results.json", json.dumps(results, indent=1)), ("results.md", card_page.page(results))):
        (folder / f"{name}.new").write_text(text)
        (folder / f"{name}.new").replace(folder / name)


def run(options: argparse.Namespace) -> int:
    """Runs the stages that are asked for and have not passed; 0 if all of them passed."""
    folder, known, begun = options.out.resolve(), stages(tiny=options.tiny), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = options.stages.split(",") if options.stages else list(known)
    before = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    results = {"tiny": options.tiny, "begun": str(datetime.datetime.now().replace(microsecond=0)), "stages": {}}
    earlier = before.get("stages", {}) if before.get("tiny") == options.tiny else {}
    for name, stage in known.items():
        results["stages"][name] = earlier.get(name, {"state": "not run"}) | {"proves": stage.proves}
    for name in chosen:
        if results["stages"][name]["state"] == "passed" and not options.again:
            continue
        left = 60 * options.minutes - (time.monotonic() - begun)
        if left < LEAST_SECONDS:
            if results["stages"][name]["state"] == "not run":
                results["stages"][name]["why"] = "no time was left"
            continue
        limit = min(known[name].seconds * (3 if options.tiny else 1), left)  # two slow cores, not a card
        print(f"{name}: at most {limit:.0f} s ...", flush=True)
        found = run_stage(name, known[name], limit, folder, tiny=options.tiny)
        results["stages"][name] = found | {"proves": known[name].proves}
        print(f"{name}: {found['state']} after {found['seconds']} s", flush=True)
        write(folder, results)
    write(folder, results)
    print(f"{folder / 'results.md'}\n{folder / 'results.json'}")
    return int(any(results["stages"][name]["state"] != "passed" for name in chosen))


def main() -> int:
    """Runs the stages, or says which wheels to carry."""
    names = list(stages(tiny=False))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of results and logs")
    parser.add_argument("--minutes", type=float, default=25, help="for all stages together (default: 25)")
    parser.add_argument("--stages", help=f"some, separated by commas, of {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="also stages that have passed")
    parser.add_argument("--tiny", action="store_true", help="on CPUs, at sizes that only check this script")
    parser.add_argument("--wheels", action="store_true", help="print what to carry to a machine without a network")
    parser.add_argument("--have", type=Path, help="what the machine has, as `pip list` or `pip freeze` print it")
    options = parser.parse_args()
    if options.wheels:
        print(card_wheels.instructions(options.have.read_text() if options.have else None))
        return 0
    if options.out is None:
        parser.error("--out names the folder of the results")
    if options.stages and (unknown := set(options.stages.split(",")) - set(names)):
        parser.error(f"unknown stages {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
