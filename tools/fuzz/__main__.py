"""Fuzzer of the library: `python -m tools.fuzz --minutes 1 [--target NAME]`.

Targets make random calls of native handlers, and random sequences of operations on tables and
checkpoints. The fuzzer prints a line for every target. If a target fails, it also prints the error,
and the command that repeats the failure, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax

from tools.fuzz import sanitizers

STUCK_SECONDS = 900
"""Time limit of a round. A round that takes longer counts as hanging.

Hypothesis may spend five minutes of the time on shrinking a failure.
"""
SHOWN_CHARACTERS = 6000


@dataclasses.dataclass(frozen=True)
class Target:
    """A function of the fuzzer, and how it is run.

    Args:
      function: `module:function` of a function that tries some cases from a seed, and returns their
        number. The target fails if the function raises an exception or the process crashes.
      sanitizer: name of the sanitizer in `sanitizers.FLAGS` with which the native library is built.
      isa: instruction set of the native kernels.
    """

    function: str
    sanitizer: str | None = None
    isa: str | None = None


TARGETS = {
    **{
        f"handlers-{sanitizer}-{isa}": Target("tools.fuzz.native_calls:run", sanitizer, isa)
        for sanitizer in sanitizers.FLAGS
        for isa in ("baseline", "avx2", "avx512")
    },
    **{
        f"partitioner-{name}": Target("tools.fuzz.properties:partitioner", name)
        for name in sanitizers.FLAGS
    },
    "cache": Target("tools.fuzz.properties:cache"),
    **{name: Target(f"tools.fuzz.{name}:run") for name in ("collection", "hashed", "files")},
}


@dataclasses.dataclass
class Outcome:
    """Result of a target. `output` is what the process of a failing target printed."""

    cases: int = 0
    seconds: float = 0.0
    verdict: str = "clean"
    output: str = ""


def not_run_because(target: Target) -> str | None:
    """The reason why a target cannot run on this machine, or None."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    first_flag = {"avx2": "avx2", "avx512": "avx512bw"}.get(target.isa or "")
    if first_flag is not None and first_flag not in flags:
        return f"not run: this processor has no {target.isa}"
    if target.sanitizer is None:
        return None
    reason = sanitizers.missing()
    if reason is None:
        return None
    return f"not run: {reason}"


def explore(name: str, target: Target, seed: int, seconds: float) -> Outcome:
    """Runs rounds in a child process, with this seed and the following ones, and at least one."""
    if (reason := not_run_because(target)) is not None:
        return Outcome(verdict=reason)
    added = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    if target.isa is not None:
        added["RSEMBED_ISA"] = target.isa
    if target.sanitizer is not None:
        print(
            f"building under -fsanitize={target.sanitizer} ...",
            end="\r",
            file=sys.stderr,
            flush=True,
        )
        added |= sanitizers.environment(target.sanitizer, sanitizers.build(target.sanitizer))
    outcome = Outcome()
    start = time.monotonic()
    said = ""
    command = [sys.executable, "-u", "-m", "tools.fuzz", "--rounds-of", target.function]
    command += ["--seed", str(seed), "--minutes", str(seconds / 60)]
    options = {
        "stdout": subprocess.PIPE,
        "cwd": Path(__file__).parents[2],
        "env": os.environ | added,
        "text": True,
    }
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stderr=errors, **options) as process,
    ):
        watch = _watching(process)
        for line in process.stdout or ():
            word, _, number = line.partition(" ")
            if word == "cases":
                outcome.cases += int(number)
            elif word == "seed":
                seed = int(number)
                watch.cancel()
                watch = _watching(process)
            else:
                said += line
        code = process.wait()
        is_stuck = not watch.is_alive()
        watch.cancel()
        outcome.seconds = time.monotonic() - start
        if code:
            errors.seek(0)
            outcome.output = (said + errors.read())[:SHOWN_CHARACTERS] or f"exit code {code}"
            again = f"python -m tools.fuzz --minutes 0 --target {name} --seed {seed}"
            problem = "HANGS" if is_stuck else "FAILS"
            outcome.verdict = f"{problem}; again: {again}"
    return outcome


def _watching(process: subprocess.Popen[str]) -> threading.Timer:
    """Starts a timer that kills a process after `STUCK_SECONDS`."""
    watch = threading.Timer(STUCK_SECONDS, process.kill)
    watch.start()
    return watch


def make_rounds(function: str, seed: int, seconds: float) -> None:
    """Runs rounds in the child process of a target.

    Prints the seed before each round, so that the seed is known even if the round ends the process.
    """
    jax.config.update("jax_num_cpu_devices", 4)
    module, _, name = function.partition(":")
    run = getattr(importlib.import_module(module), name)
    end = time.monotonic() + seconds
    while True:
        print(f"seed {seed}")
        print(f"cases {run(seed)}")
        seed += 1
        if time.monotonic() >= end:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="for each target; ten for a real run"
    )
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="one of them; may be given again"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**9),
        help="of the first round",
    )
    parser.add_argument("--rounds-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds_of:
        make_rounds(options.rounds_of, options.seed, 60 * options.minutes)
        return 0
    print(f"{'target':<26}{'cases':>9}{'seconds':>9}{'seed':>11}  verdict", flush=True)
    outputs = []
    for name in options.target or TARGETS:
        outcome = explore(name, TARGETS[name], options.seed, 60 * options.minutes)
        print(
            f"{name:<26}{outcome.cases:>9}{outcome.seconds:>9.0f}{options.seed:>11}  {outcome.verdict}",
            flush=True,
        )
        if outcome.output:
            print(outcome.output, flush=True)
        outputs.append(outcome.output)
    return int(any(outputs))


if __name__ == "__main__":
    sys.exit(main())
