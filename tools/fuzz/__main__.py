"""Random calls and random lives of what the library keeps: `python -m tools.fuzz --minutes 1 [--target NAME]`.

Prints a line for every target. A failing one says what it saw, and how to see it again. The exit code is 1 if any did.
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
"""A round that takes longer hangs; one that fails may be made smaller for five minutes."""
SHOWN_CHARACTERS = 6000


@dataclasses.dataclass(frozen=True)
class Target:
    """`module:function`; of a seed it makes some cases and says how many, and it fails by an exception or a crash."""

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
    """What became of a target; `output` is what a failing one said."""

    cases: int = 0
    seconds: float = 0.0
    verdict: str = "clean"
    output: str = ""


def not_run_because(target: Target) -> str | None:
    """What a target needs that is not here, or None."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    first_flag = {"avx2": "avx2", "avx512": "avx512bw"}.get(target.isa or "")
    if first_flag is not None and first_flag not in flags:
        return f"not run: this processor has no {target.isa}"
    reason = None if target.sanitizer is None else sanitizers.missing()
    return None if reason is None else f"not run: {reason}"


def explore(name: str, target: Target, seed: int, seconds: float) -> Outcome:
    """Rounds with this seed and the following ones, at least one, in a process of their own."""
    if (reason := not_run_because(target)) is not None:
        return Outcome(verdict=reason)
    added = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    added |= {} if target.isa is None else {"RSEMBED_ISA": target.isa}
    if target.sanitizer is not None:
        print(
            f"building under -fsanitize={target.sanitizer} ...",
            end="\r",
            file=sys.stderr,
            flush=True,
        )
        added |= sanitizers.environment(target.sanitizer, sanitizers.build(target.sanitizer))
    outcome, start, said = Outcome(), time.monotonic(), ""
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
        code, is_stuck = process.wait(), not watch.is_alive()
        watch.cancel()
        outcome.seconds = time.monotonic() - start
        if code:
            errors.seek(0)
            outcome.output = (said + errors.read())[:SHOWN_CHARACTERS] or f"exit code {code}"
            again = f"python -m tools.fuzz --minutes 0 --target {name} --seed {seed}"
            outcome.verdict = f"{'HANGS' if is_stuck else 'FAILS'}; again: {again}"
    return outcome


def _watching(process: subprocess.Popen[str]) -> threading.Timer:
    """Ends a process that says nothing for long."""
    watch = threading.Timer(STUCK_SECONDS, process.kill)
    watch.start()
    return watch


def make_rounds(function: str, seed: int, seconds: float) -> None:
    """In the process of a target: says before each round which it is, so that one that ends the process is known."""
    jax.config.update("jax_num_cpu_devices", 4)
    module, _, name = function.partition(":")
    run, end = getattr(importlib.import_module(module), name), time.monotonic() + seconds
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
