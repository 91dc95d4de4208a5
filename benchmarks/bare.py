"""Times bare C++ loops over the ids of `tbe` and `lookup`: what the memory of a machine gives to any implementation.

    python benchmarks/bare.py [--json PATH]

Compiles `bare.cc` with g++ for this processor. A lookup pools the rows of every bag. An update sums the gradients of
equal rows and steps each row once, by SGD or by row-wise Adagrad, over entries that were sorted before the clock
started; a step is at least a lookup and an update. There is no framework, no check and no allocation, threads never
sleep, and the best of several prefetch distances counts. Milliseconds, median and best.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from timing import WORKLOADS, Times, Workload, draw_ids, make_parser, write_records


def time_loops(program: Path, workload: Workload, law: str) -> dict[str, Times]:
    """What the program prints for one workload: `lookup`, and updates by `SGD` and row-wise `Adagrad`."""
    sizes = (
        workload.num_tables,
        workload.vocabulary_size,
        workload.embedding_dim,
        workload.batch_size,
    )
    with tempfile.NamedTemporaryFile() as ids:
        draw_ids(workload, law, seed=3).tofile(ids.name)
        command = [program, ids.name, *map(str, sizes), str(workload.ids_per_sample)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in output.splitlines()]
    return {name: Times(float(median), float(best)) for name, median, best in lines}


def least_step(times: dict[str, Times], rule: str) -> Times:
    """A lookup and an update by this rule."""
    lookup, update = times["lookup"], times[rule]
    return Times(lookup.median + update.median, lookup.best + update.best)


def main() -> int:
    """Prints the table, and writes it if asked."""
    options, records = make_parser(__doc__).parse_args(), []
    print(f"{'workload':<9}{'ids':<9}{'lookup':>16}{'SGD':>16}{'Adagrad':>16}")
    with tempfile.TemporaryDirectory() as folder:
        program, source = Path(folder, "bare"), Path(__file__).with_suffix(".cc")
        subprocess.run(
            ["g++", "-O3", "-march=native", "-std=c++17", "-pthread", source, "-o", program],
            check=True,
        )
        for workload in WORKLOADS:
            for law in ("uniform", "zipf"):
                times = time_loops(program, workload, law)
                milliseconds = {name: own._asdict() for name, own in times.items()}
                records.append(
                    {"workload": workload.name, "ids": law, "milliseconds": milliseconds}
                )
                cells = "".join(
                    f"{f'{own.median:.2f} ({own.best:.2f})':>16}" for own in times.values()
                )
                print(f"{workload.name:<9}{law:<9}{cells}", flush=True)
    write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
