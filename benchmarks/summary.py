"""Times all workloads with all peers that are installed, beside bare loops: two tables and a picture.

    python benchmarks/summary.py [--quick] [--rounds 4] [--json PATH] [--picture PATH]

The first table has the workloads of `lookup.py`, the contestants of `tbe.py` (of ours, the compiled
step) and the loops of `bare.py`, which know the order of all ids in advance. `of bare` is the time of
the loops over our time. `FBGEMM/` and `torch/` are times of peers over ours. The second table is that
of `ragged.py`: how long it takes to prepare ragged batches, and TorchRec's time.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
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

OURS = "ours, jit"
PEERS = ("FBGEMM", "torch")
CELL_WIDTHS = (16, 10, 10, 10, 10)
# Names of the rules of `tbe.py` in `bare.py`, and of their steps in the table.
RULES = {
    "EXACT_SGD": ("SGD", "step, SGD"),
    "EXACT_ROWWISE_ADAGRAD": ("Adagrad", "step, row-wise Adagrad"),
}


def machine() -> str:
    """Processor, number of cores, date, and instruction set of the kernels."""
    return f"{measured_on()}, {native.instruction_set()}"


def makers() -> list[Any]:
    """Functions that make our contestants and those of the peers that can be imported."""
    makers: list[Any] = [tbe.our_contestants]
    for name, maker in (("torch", tbe.torch_contestant), ("fbgemm_gpu", tbe.fbgemm_contestant)):
        try:
            __import__(name)
            makers.append(maker)
        except (ImportError, OSError) as error:
            print(f"without {name}: {error}")
    return makers


def measure(
    workload: timing.Workload, law: str, program: Path, num_rounds: int, contestants: list[Any]
) -> list[dict]:
    """Records of a workload: medians and bests of all contestants, for a lookup and two steps."""
    loops = bare.time_loops(program, workload, law)
    batches = tbe.draw_batches(workload, law)
    records = []
    for optimizer, (rule, step) in RULES.items():
        times_by_kind = tbe.race_all(contestants, workload, batches, optimizer, num_rounds)
        gc.collect()
        for kind, times in times_by_kind.items():
            what = step
            least = bare.least_step(loops, rule)
            if kind == "lookup":
                what = "lookup"
                least = loops["lookup"]
            record = {"workload": workload.name, "ids": law, "what": what, "bare": least._asdict()}
            for name in (OURS, *PEERS):
                if name in times:
                    record[name] = times[name]._asdict()
            records.append(record)
            print(row_of(record), flush=True)
    return records


def row_of(record: dict) -> str:
    """A row of the printed table."""
    ours = Times(**record[OURS])
    least = Times(**record["bare"])
    cells = [
        f"{ours.median:.2f} ({ours.best:.2f})",
        f"{least.median:.2f}",
        f"{least.median / ours.median:.2f}",
    ]
    for name in PEERS:
        cell = "-"
        if name in record:
            cell = f"{record[name]['median'] / ours.median:.2f}"
        cells.append(cell)
    name = f"{record['workload']:<9}{record['ids']:<9}{record['what']:<24}"
    return name + aligned(cells)


def aligned(cells: Sequence[str]) -> str:
    """The cells of a row, aligned to the right."""
    widths = zip(cells, CELL_WIDTHS, strict=True)
    return "".join(f"{cell:>{width}}" for cell, width in widths)


def draw(records: list[dict], path: Path) -> None:
    """Draws times relative to the bare loops. Each run of a workload has a line of points."""
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.28 * len(records)), layout="constrained")
    heights = np.arange(len(records))[::-1]
    labels = []
    for record in records:
        labels.append(f"{record['workload']}, {record['ids']}: {record['what']}")
    for name, marker in zip((OURS, *PEERS), "oDs", strict=True):
        ratios = []
        heights_of_name = []
        for record, height in zip(records, heights, strict=True):
            if name in record:
                ratios.append(record[name]["median"] / record["bare"]["median"])
                heights_of_name.append(height)
        if ratios:
            label = "rsembed" if name == OURS else name
            axes.plot(ratios, heights_of_name, marker, label=label)
    axes.set_yticks(heights, labels)
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(axis="y", color="0.9")
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xlabel("time / time of bare loops")
    num_fastest = 0
    for record in records:
        peers = [record[name]["median"] for name in PEERS if name in record]
        num_fastest += record[OURS]["median"] <= min(peers, default=np.inf)
    axes.set_title(
        f"rsembed is fastest in {num_fastest} of {len(records)} runs\n{machine()}",
        fontsize=10,
        loc="left",
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Prints the tables, and writes records and picture to the files of the options."""
    parser = timing.make_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="no workload above 2 GB, and two rounds"
    )
    parser.add_argument("--rounds", type=int, help="times all batches are run (default 4, quick 2)")
    parser.add_argument("--picture", type=Path, help="also draw the table into this file")
    options = parser.parse_args()
    matplotlib.use("Agg")
    workloads = timing.WORKLOADS
    sizes = ragged.SIZES
    num_rounds = options.rounds or 4
    if options.quick:
        workloads = workloads[:2]
        sizes = sizes[:2]
        num_rounds = options.rounds or 2
    contestants = makers()
    print(machine())
    heads = ("ours ms (best)", "bare ms", "of bare", "FBGEMM/", "torch/")
    print(" " * 42 + aligned(heads))
    records = []
    with tempfile.TemporaryDirectory() as folder:
        program = bare.compile_loops(folder)
        for workload in workloads:
            for law in ("uniform", "zipf"):
                records += measure(workload, law, program, num_rounds, contestants)
    all_records = {
        "machine": machine(),
        "records": records,
        "ragged": ragged.print_sizes(sizes, num_rounds),
    }
    timing.write_records(options, all_records)
    if options.picture:
        draw(records, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
