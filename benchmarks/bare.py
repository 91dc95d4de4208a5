"""Times bare C++ loops over the ids of `tbe` and `lookup`: a bound that the machine's memory sets.

    python benchmarks/bare.py [--json PATH]

g++ compiles `bare.cc` for this processor. A lookup pools the rows of each bag. An update sums the
gradients of equal rows and updates each row once, by SGD or row-wise Adagrad. Its entries are sorted
before the clock starts. A training step takes at least the time of a lookup and an update. There is no
framework, no check and no allocation, threads never sleep, and the best of several prefetch distances
counts. Times are medians and bests in milliseconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from timing import WORKLOADS, Times, Workload, draw_ids, make_parser, write_records


def time_loops(program: Path, workload: Workload, law: str) -> dict[str, Times]:
    """Times of `lookup`, and of updates by `SGD` and row-wise `Adagrad`, for a workload."""
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
    times = {}
    for line in output.splitlines():
        name, median, best = line.split()
        times[name] = Times(float(median), float(best))
    return times


def compile_loops(folder: str) -> Path:
    """The compiled program, in a folder."""
    program = Path(folder, "bare")
    source = Path(__file__).with_suffix(".cc")
    flags = ["-O3", "-march=native", "-std=c++17", "-pthread"]
    subprocess.run(["g++", *flags, source, "-o", program], check=True)
    return program


def least_step(times: dict[str, Times], rule: str) -> Times:
    """Times of a lookup and an update by a rule together."""
    lookup = times["lookup"]
    update = times[rule]
    return Times(lookup.median + update.median, lookup.best + update.best)


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    options = make_parser(__doc__).parse_args()
    print(f"{'workload':<9}{'ids':<9}{'lookup':>16}{'SGD':>16}{'Adagrad':>16}")
    records = []
    with tempfile.TemporaryDirectory() as folder:
        program = compile_loops(folder)
        for workload in WORKLOADS:
            for law in ("uniform", "zipf"):
                milliseconds = {}
                line = f"{workload.name:<9}{law:<9}"
                for name, times in time_loops(program, workload, law).items():
                    milliseconds[name] = times._asdict()
                    cell = f"{times.median:.2f} ({times.best:.2f})"
                    line += f"{cell:>16}"
                record = {"workload": workload.name, "ids": law, "milliseconds": milliseconds}
                records.append(record)
                print(line, flush=True)
    write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
