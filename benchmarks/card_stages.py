"""Stages of `card.py` that compute in a process of their own: `python benchmarks/card_stages.py STAGE --records FILE`.

A stage yields records as it goes; the file is written after each, so that one which runs out of time leaves what it
has. Without a GPU the kernels run in Pallas' interpreter, at the sizes of `--tiny`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu as contestants
import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed.kernels import gpu, reference
from rsembed.kernels.contract import Segment, SegmentGradients, Step
from rsembed.tt import TensorTrain

Records = Iterator[dict[str, Any]]
KERNELS = {"reference": reference, "gpu": gpu}
PACKAGES = ("rsembed", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "fbgemm-gpu")


def driver() -> str:
    """Version of NVIDIA's driver, as its own tool tells it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"


def version(package: str) -> str:
    """Of an installed package, or that it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine(*, tiny: bool) -> Records:
    """Card, driver, versions and date, and what a large copy moves."""
    device = jax.devices()[0]
    yield {
        "device": device.device_kind,
        "platform": device.platform,
        "num_devices": len(jax.devices()),
        "driver": driver(),
        "python": platform.python_version(),
        "date": str(datetime.date.today()),
        **{package: version(package) for package in PACKAGES},
    }
    yield {"copy_bytes_per_second": contestants.copy_bandwidth(1 << 24 if tiny else 1 << 30)}


def compiled_step(module: Any, shape: tuple[int, int], num_bags: int, rule: Any) -> tuple[Any, list[Any]]:
    """A compiled lookup and update of donated state, and its arguments."""
    ids = np.random.default_rng(0).integers(0, shape[0], num_bags * 20, dtype=np.int32)
    bounds, hyper = jnp.arange(num_bags + 1, dtype=jnp.int32) * 20, rule.get_hyperparameters(0)
    table = jnp.zeros(shape, jnp.float32)

    def train(table: Any, slots: Any, ids: Any) -> Any:
        segments = [Segment(ids, bounds, None, "mean")]
        (output,) = module.lookup(table, segments)
        return module.update(table, slots, SegmentGradients(segments, [output - 1.0]), Step(hyper, rule))

    arguments = [table, rule.init_slots(table), jnp.asarray(ids)]
    return jax.jit(train, donate_argnums=(0, 1)).lower(*arguments).compile(), arguments


def in_place(*, tiny: bool) -> Records:
    """Whether steps of donated tables copy one, by the compiled program and by the memory the card has held."""
    shape, num_bags = ((2000, 8), 8) if tiny else ((1 << 24, 128), 1 << 14)  # 8 GiB
    rules = {"SGD": rs.SGDOptimizerSpec(0.01), "row-wise Adagrad": rs.RowWiseAdagradOptimizerSpec(0.01)}
    text_of_shape = re.escape(f"f32[{shape[0]},{shape[1]}]")
    copies = re.compile(rf"= \(?{text_of_shape}\S* (copy|copy-start)\(")
    for name, module in reversed(KERNELS.items()):  # the peak of a process never falls: the kernels first
        for rule_name, rule in rules.items():
            compiled, (table, slots, ids) = compiled_step(module, shape, num_bags, rule)
            state_bytes = sum(array.nbytes for array in jax.tree.leaves((table, slots)))
            place = table.unsafe_buffer_pointer()
            for _ in range(3):
                table, slots = compiled(table, slots, ids)
            table.block_until_ready()
            memory = compiled.memory_analysis()
            held = jax.devices()[0].memory_stats() or {}  # None where a backend does not count
            yield {
                "kernels": name,
                "rule": rule_name,
                "state_bytes": state_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "table_copies_in_program": len(copies.findall(compiled.as_text())),
                "table_stays_where_it_was": table.unsafe_buffer_pointer() == place,
                "peak_bytes": held.get("peak_bytes_in_use"),
            }
            del table, slots, compiled


def workload(letter: str, *, tiny: bool) -> Records:
    """Lookups and fused steps of one workload with every contestant that is installed."""
    bandwidth = contestants.copy_bandwidth(1 << 24 if tiny else 1 << 30)
    case = contestants.cases(tiny=tiny)[letter]
    yield from contestants.measure(letter, case, 1 if tiny else 8, bandwidth)


def homes(*, tiny: bool) -> Records:
    """Training steps by where rows are kept, with and without the kernels: one model, equal ids."""
    rows, dim, batch, ids_per_sample, num_steps = (60, 16, 8, 3, 2) if tiny else (1_000_000, 32, 40_960, 10, 20)
    storages = {
        "array": None,
        "hashed": rs.Hashed(),
        "cached": rs.HostCached(cache_rows=rows // 2),
        "tensor train": TensorTrain((4,) if tiny else (16, 16)),
    }
    shape = (contestants.NUM_BATCHES, batch, ids_per_sample)
    ids = contestants.timing.ids_by_law("zipf", rows, shape, 3, exponent=1.05)
    for where, storage in storages.items():
        outputs = {}
        for name in KERNELS:
            about = {"rows": where, "kernels": name}
            try:
                seconds, outputs[name] = train_collection(storage, name, (rows, dim), ids, num_steps)
            except (RuntimeError, NotImplementedError, ValueError) as problem:
                yield about | {"error": f"{type(problem).__name__}: {problem}"[:500]}
                continue
            expected = outputs.get("reference", outputs[name])
            difference = np.abs(outputs[name] - expected).mean() / np.abs(expected).mean()
            yield about | {
                "milliseconds": 1e3 * seconds,
                "ns_per_id": 1e9 * seconds / ids[0].size,
                "difference": float(difference),
            }


def train_collection(
    storage: Any, implementation: str, shape: tuple[int, int], ids: np.ndarray, num_steps: int
) -> tuple[float, np.ndarray]:
    """Median seconds of a step, with what brings rows near where that is needed, and a lookup at the end."""
    rule = rs.AdagradOptimizerSpec(0.01)
    table = rs.TableSpec(name="t", vocabulary_size=shape[0], embedding_dim=shape[1], optimizer=rule, storage=storage)
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)], implementation=implementation)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        outputs, _ = collection.lookup_vjp(state, batch)
        return collection.update(state, batch, jax.tree.map(lambda x: x - 1.0, outputs))

    batches = [collection.prepare({"f": own}) for own in ids]
    state, seconds = collection.init(jax.random.key(0)), []
    for number in range(num_steps + len(batches)):  # the first time, a batch brings rows and keys
        start = time.perf_counter()
        batch = batches[number % len(batches)]
        state = jax.block_until_ready(step(collection.prefetch(state, batch), batch))
        seconds.append(time.perf_counter() - start)
    output = collection.lookup(collection.prefetch(state, batches[0]), batches[0])["f"]
    return float(np.median(seconds[len(batches) :])), np.asarray(output)


def tiling(*, tiny: bool) -> Records:
    """Times of the kernels by how a program's work is cut, the present choice first: what to tune."""
    warps, entries = ((4,), (1, 16)) if tiny else ((1, 2, 4, 8), (1, 4, 16, 32))
    choices = [gpu.Tiling(), *(gpu.Tiling(num_warps=w, max_entries=e) for w in warps for e in entries)]
    choices += [] if tiny else [gpu.Tiling(piece_entries=number) for number in (64, 1024)]
    known = contestants.cases(tiny=tiny)
    inputs = {letter: contestants.draw(known[letter]) for letter in "ADB"}
    present = gpu.tiling
    for number, choice in enumerate(choices):
        gpu.tiling = choice
        for letter in inputs:
            if number and choice.piece_entries != present.piece_entries and letter != "D":
                continue  # only skewed ids have long rows
            rule = contestants.RULES["SGD"]
            contestant = contestants.kernel_contestant(gpu, known[letter].workload, inputs[letter], rule)
            for kind in ("lookup", "step"):
                median, best = contestants.times(getattr(contestant, kind), contestant.wait, 1 if tiny else 3)
                record = {"case": letter, "what": kind, "milliseconds": 1e3 * median, "best_milliseconds": 1e3 * best}
                yield record | choice._asdict()
            del contestant
    gpu.tiling = present


STAGES: dict[str, Callable[..., Records]] = {
    "machine": machine,
    "in_place": in_place,
    "homes": homes,
    "tiling": tiling,
    **{f"workload_{letter}": functools.partial(workload, letter) for letter in "ABCDT"},
}


def main() -> int:
    """Runs one stage; fails if a record has an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--records", type=Path, required=True, help="file that the records are written to, as JSON")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if gpu.unavailable_because() is not None:
        if not options.tiny:
            sys.exit(f"no GPU: {gpu.unavailable_because()}; --tiny runs the interpreter")
        gpu.unavailable_because = lambda: None  # collections, too, take the kernels, in the interpreter
    records: list[dict[str, Any]] = []
    for record in STAGES[options.stage](tiny=options.tiny):
        records.append(record)
        print(json.dumps(record), flush=True)
        options.records.write_text(json.dumps(records))
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
