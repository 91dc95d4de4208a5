"""Times every workload with every peer that is installed beside bare loops, in one run: two tables and one picture.

    python benchmarks/summary.py [--quick] [--rounds 4] [--json PATH] [--picture PATH]

Tables, batches and contestants are those of `tbe.py` (ours is one compiled step), loops those of `bare.py`, which know
the order of all ids beforehand. A share of bare is the time of the loops over that of ours; peers are divided by ours.
The second table is that of `ragged.py`: what it costs to prepare ragged batches, and TorchRec.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bare
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import ragged
import tbe
import timing
from timing import Times

from rsembed.kernels import native
from rsembed.plot.drawing import measured_on

OURS, PEERS = "ours, jit", ("FBGEMM", "torch")
RULES = {
    "EXACT_SGD": ("SGD", "step, SGD"),
    "EXACT_ROWWISE_ADAGRAD": ("Adagrad", "step, row-wise Adagrad"),
}


def machine() -> str:
    """What belongs to every time: processor, cores, date, and instruction set of the kernels."""
    return f"{measured_on()}, {native.instruction_set()}"


def makers() -> list[Any]:
    """Ours and the peers that can be imported."""
    found = [tbe.our_contestants]
    for name, maker in (("torch", tbe.torch_contestant), ("fbgemm_gpu", tbe.fbgemm_contestant)):
        try:
            __import__(name)
            found.append(maker)
        except (ImportError, OSError) as error:
            print(f"without {name}: {error}")
    return found


def measure(
    workload: timing.Workload, law: str, program: Path, num_rounds: int, contestants: list[Any]
) -> list[dict]:
    """One record per kind of run: medians and bests of everyone, in milliseconds."""
    loops = bare.time_loops(program, workload, law)
    batches, records = tbe.draw_batches(workload, law), []
    for optimizer, (rule, step) in RULES.items():
        times = tbe.race_all(contestants, workload, batches, optimizer, num_rounds)
        gc.collect()
        for kind, of_kind in times.items():
            least = loops["lookup"] if kind == "lookup" else bare.least_step(loops, rule)
            own = {name: of_kind[name]._asdict() for name in (OURS, *PEERS) if name in of_kind}
            what = kind if kind == "lookup" else step
            records.append(
                {"workload": workload.name, "ids": law, "what": what}
                | own
                | {"bare": least._asdict()}
            )
            print(row_of(records[-1]), flush=True)
    return records


def row_of(record: dict) -> str:
    """A row of the printed table."""
    ours, least = Times(**record[OURS]), Times(**record["bare"])
    cells = [
        f"{ours.median:.2f} ({ours.best:.2f})",
        f"{least.median:.2f}",
        f"{least.median / ours.median:.2f}",
    ]
    cells += [
        f"{record[name]['median'] / ours.median:.2f}" if name in record else "-" for name in PEERS
    ]
    name = f"{record['workload']:<9}{record['ids']:<9}{record['what']:<24}"
    return name + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, (16, 10, 10, 10, 10), strict=True)
    )


def draw(records: list[dict], path: Path) -> None:
    """Times of everyone as multiples of the bare loops', a line of points for each kind of run of each workload."""
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.28 * len(records)), layout="constrained")
    places = np.arange(len(records))[::-1]
    for name, marker in zip((OURS, *PEERS), "oDs", strict=True):
        ratios = [
            record[name]["median"] / record["bare"]["median"] if name in record else None
            for record in records
        ]
        points = [
            (ratio, place) for ratio, place in zip(ratios, places, strict=True) if ratio is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, label="rsembed" if name == OURS else name)
    axes.set_yticks(places, [f"{r['workload']}, {r['ids']}: {r['what']}" for r in records])
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(axis="y", color="0.9")
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xlabel("time / time of bare loops")
    fastest = [
        all(r[OURS]["median"] <= r[name]["median"] for name in PEERS if name in r) for r in records
    ]
    axes.set_title(
        f"rsembed is fastest in {sum(fastest)} of {len(records)} runs\n{machine()}",
        fontsize=10,
        loc="left",
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Prints the table, and writes records and picture if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="no workload above 2 GB, and two rounds"
    )
    parser.add_argument("--rounds", type=int, help="times all batches are run (default 4, quick 2)")
    parser.add_argument("--picture", type=Path, help="also draw the table into this file")
    options = parser.parse_args()
    matplotlib.use("Agg")
    workloads = timing.WORKLOADS[:2] if options.quick else timing.WORKLOADS
    num_rounds = options.rounds or (2 if options.quick else 4)
    contestants, records = makers(), []
    print(machine())
    heads = ("ours ms (best)", "bare ms", "of bare", "FBGEMM/", "torch/")
    print(
        " " * 42
        + "".join(
            f"{head:>{width}}" for head, width in zip(heads, (16, 10, 10, 10, 10), strict=True)
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        program, source = Path(folder, "bare"), Path(bare.__file__).with_suffix(".cc")
        subprocess.run(
            ["g++", "-O3", "-march=native", "-std=c++17", "-pthread", source, "-o", program],
            check=True,
        )
        for workload in workloads:
            for law in ("uniform", "zipf"):
                records += measure(workload, law, program, num_rounds, contestants)
    sizes = ragged.SIZES[:2] if options.quick else ragged.SIZES
    of_ragged = ragged.print_sizes(sizes, num_rounds)
    timing.write_records(options, {"machine": machine(), "records": records, "ragged": of_ragged})
    if options.picture:
        draw(records, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
