"""The page that `card.py` writes of its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GOALS = (
    ("share of a copy, pooled lookups of rows of 256 bytes and more", 0.8),
    ("torch / ours, lookups", 1.0),
    ("torch / ours, sparse steps with SGD", 3.0),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [list(heads), ["---"] * len(heads), *cells]] if cells else []


def number(value: Any, digits: int = 2) -> str:
    """A number in few characters, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def gib(num_bytes: Any) -> str:
    """Bytes in GiB."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.3f} GiB"


def records_of(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Those of a stage, if it has any."""
    return results["stages"].get(name, {}).get("records", [])


def timed(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of all workloads."""
    return [record for letter in "ABCDT" for record in records_of(results, f"workload_{letter}")]


def page(results: dict[str, Any]) -> str:
    """Markdown of all that was found, and of what was not run."""
    about = dict(pair for record in records_of(results, "machine") for pair in record.items())
    lines = ["# rsembed on a GPU", ""]
    if results["tiny"]:
        trial = (
            "**A trial of the script on CPUs, at tiny sizes: these numbers say nothing about speed, and a stage that "
        )
        lines += [trial + "passed shows that the script works, not what its line says of a card.**", ""]
    lines += [f"{about.get('device', 'unknown device')}, driver {about.get('driver', 'unknown')}, {results['begun']}"]
    versions = ("python", "rsembed", "jax", "jaxlib", "torch", "fbgemm-gpu")
    lines += ["; ".join(f"{name} {about[name]}" for name in versions if name in about)]
    if copy := about.get("copy_bytes_per_second"):
        lines += [f"A copy reads and writes {copy / 1e9:.0f} GB/s."]
    lines += ["", "## Stages", ""]
    stages = results["stages"].items()
    rows = [[name, own["state"], number(own.get("seconds"), 0), own["proves"]] for name, own in stages]
    lines += table(["stage", "state", "seconds", "what it shows where it passed"], rows)
    for section in (goals, times, in_place, homes, tests, tiling, notebooks, failures):
        lines += section(results)
    return "\n".join(lines) + "\n"


def goals(results: dict[str, Any]) -> list[str]:
    """What was aimed at, and the worst and best workload."""
    by_key = {(r["case"], r["what"], r["who"]): r for r in timed(results) if "error" not in r}

    def of_torch(what: str) -> list[tuple[float, str]]:
        ours = {case: r for (case, own, who), r in by_key.items() if own == what and who == "ours"}
        peers = {case: r for (case, own, who), r in by_key.items() if own == what and who == "torch"}
        return [(peers[case]["milliseconds"] / ours[case]["milliseconds"], case) for case in ours if case in peers]

    shares = [
        (r["share_of_copy"], case) for (case, what, who), r in by_key.items() if (what, who) == ("lookup", "ours")
    ]
    rows = []
    for (what, goal), values in zip(GOALS, (shares, of_torch("lookup"), of_torch("step, SGD")), strict=True):
        values = [] if results["tiny"] else values
        found = "; ".join(f"{case} {value:.2f}" for value, case in sorted(values)) or "not measured"
        verdict = "-" if not values else "reached" if min(values)[0] >= goal else "missed"
        rows.append([what, goal, found, verdict])
    return ["", "## Goals", "", *table(["what", "goal", "found", "verdict"], rows)]


def times(results: dict[str, Any]) -> list[str]:
    """Everybody's times of all workloads."""
    rows = []
    for r in timed(results):
        start = [r["case"], r["ids"], r["what"], r["who"]]
        if "error" in r:
            rows.append([*start, r["error"][:120], "-", "-", "-"])
        else:
            cells = [
                f"{number(r['milliseconds'], 3)} ({number(r['best_milliseconds'], 3)})",
                number(r["ns_per_row"], 3),
            ]
            rows.append([*start, *cells, number(r["gb_per_second"], 1), number(r["share_of_copy"])])
    heads = ["case", "ids", "what", "who", "ms (best)", "ns per row", "GB/s", "of a copy"]
    note = (
        "GB/s counts as FBGEMM does; torch's Adagrad is elementwise. Cases: the list of stages, and benchmarks/gpu.py."
    )
    return ["", "## Lookups and steps", "", note, "", *table(heads, rows)] if rows else []


def in_place(results: dict[str, Any]) -> list[str]:
    """Copies and peak memory."""
    rows = [
        [
            *(r["kernels"], r["rule"], gib(r["state_bytes"]), gib(r["aliased_bytes"]), gib(r["temporary_bytes"])),
            *(r["table_copies_in_program"], r["table_stays_where_it_was"], gib(r["peak_bytes"])),
        ]
        for r in records_of(results, "in_place")
    ]
    heads = ["kernels", "rule", "state", "aliased", "temporary", "copies in the program", "stays", "peak so far"]
    return ["", "## Updates in place", "", *table(heads, rows)] if rows else []


def homes(results: dict[str, Any]) -> list[str]:
    """Training steps by where rows are kept."""
    rows = [
        [r["rows"], r["kernels"], *([r["error"][:120], "-", "-"] if "error" in r else _cells(r))]
        for r in records_of(results, "homes")
    ]
    heads = ["rows", "kernels", "ms", "ns per id", "difference"]
    return ["", "## Where rows are kept", "", *table(heads, rows)] if rows else []


def _cells(record: dict[str, Any]) -> list[str]:
    return [number(record["milliseconds"], 3), number(record["ns_per_id"], 2), f"{record['difference']:.1e}"]


def tests(results: dict[str, Any]) -> list[str]:
    """Counts of the suite, and what failed."""
    lines = []
    for name, stage in results["stages"].items():
        if "counts" in stage:
            counts = ", ".join(f"{count} {outcome.lower()}" for outcome, count in stage["counts"].items())
            lines += [f"* `{name}`: {counts or 'nothing ran'}"]
            lines += [f"  * failed: `{test}`" for test in stage["failed"][:40]]
            lines += [f"  * and {len(stage['failed']) - 40} more"] if len(stage["failed"]) > 40 else []
    return ["", "## Tests", "", *lines] if lines else []


def tiling(results: dict[str, Any]) -> list[str]:
    """The present cut and the fastest ones."""
    rows = []
    records = records_of(results, "tiling")
    for case, what in dict.fromkeys((r["case"], r["what"]) for r in records):
        own = [r for r in records if (r["case"], r["what"]) == (case, what)]
        for r in [own[0], *sorted(own[1:], key=lambda r: r["milliseconds"])[:3]]:
            cut = [r[name] for name in ("num_warps", "max_entries", "piece_entries")]
            rows.append([case, what, *cut, number(r["milliseconds"], 3), "present" if r is own[0] else ""])
    heads = ["case", "what", "warps", "entries at once", "entries of a piece", "ms", ""]
    return ["", "## How work is cut: the present choice and the three fastest", "", *table(heads, rows)] if rows else []


def notebooks(results: dict[str, Any]) -> list[str]:
    """What tutorials printed last."""
    lines = []
    for name, stage in results["stages"].items():
        if stage.get("printed"):
            lines += ["", f"`{name}`:", "", *(f"    {line}" for line in stage["printed"])]
    return ["", "## Tutorials", *lines] if lines else []


def failures(results: dict[str, Any]) -> list[str]:
    """Ends of the logs of what did not pass, and what was not run."""
    not_run = [name for name, stage in results["stages"].items() if stage["state"] == "not run"]
    lines = ["", "## Not run, hence unproven", "", ", ".join(not_run) or "nothing"]
    for name, stage in results["stages"].items():
        if tail := stage.get("log_tail"):
            lines += ["", f"## `{name}`: {stage['state']}", "", *(f"    {line}" for line in tail.splitlines()[-25:])]
    return lines
