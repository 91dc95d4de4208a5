"""Plants known faults in copies of the library, one by one, and fails if tests do not find one.

    python -m tools.planted_faults --workers 2             all faults, in half an hour, or less if tests ran before
    python -m tools.planted_faults storage/ tt/spec        faults in paths with one of these words
    python -m tools.planted_faults --check                 runs only the tests of `make check`

The tests of `make check` find most faults. Run this before and after you shorten tests. A fault
whose text does not occur exactly once in its file is an error, too. If you move code, change its
faults.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHECK = "tests/check.txt"
"""File with the tests of `make check`, one in each line."""
MOST_SECONDS = 600
"""Time limit of a run of tests. A fault that makes tests hang counts as found."""

# Each block begins with a file of the library and arguments of pytest, which select the tests that
# must fail. The indented lines are faults: a text of the file, and the text that replaces it.
FAULTS = """
kernels/reference.py  kernels/test_contract.py -k reference
    divisor = jnp.sqrt(divisor) => pass
    & is_between(bag, 0, entries.num_outputs) => & is_between(bag, 0, entries.num_outputs + 1)
    rows + first_rows, NO_ROW) => rows, NO_ROW)
    jnp.where(by_bag(ids, segments, chosen, False), shares, gains) => shares
kernels/contract.py  kernels/test_contract.py -k reference
    starts = itertools.accumulate(sizes, initial=0) => starts = [0] * len(sizes)
kernels/native.py  kernels/test_keys.py
    return tuple(sorted_lanes), entry_of, first_of, => return tuple(sorted_lanes), first_of, entry_of,
kernels/keyed.py  kernels/test_keys.py
    (slot_lanes[:, 0] == high) & (slot_lanes[:, 1] == low) => (slot_lanes[:, 1] == low)
kernels/ids.py  kernels/test_ids.py
    < ends[-1] => <= ends[-1]
optimizers/rules.py  optimizers/test_contract.py
    (gradients * gradients - slots[1]) => (gradients - slots[1])
    decay * momentum + direction, momentum) => momentum + direction, momentum)
    jnp.clip(linear, -threshold, threshold) - linear => jnp.clip(linear, -threshold, threshold)
    (1.0 - beta_1) * (gradients - slots[0]) => (1.0 - beta_1) * gradients
places.py  test_places.py
    else (phase - self.rotation) % spread => else (phase + self.rotation) % spread
stacking.py  test_stacking.py
    -(-value // multiple) * multiple => (value // multiple + 1) * multiple
    table.embedding_dim if table.optimizer.is_row_wise else None, => None,
keys.py  test_keys.py
    ((keys.high % n) * wrap + keys.low % n) % n => ((keys.high % n) + keys.low % n) % n
bags.py  test_bags.py
    floats_of(gains, "from_coo")[order] => floats_of(gains, "from_coo")
bags.py  collection/test_embeddings.py -k out_of_range
    xp.clip(ids, lowest, 2**31 - 1) => ids
row_gradients.py  test_row_gradients.py
    max_norm / jnp.maximum(norm, 1e-38), 1.0) => max_norm / jnp.maximum(norm, 1e-38), 0.5)
    every = (first, *others) => every = (first,)
    opaque.wrap(numbers ^ np.int32(NO_ROW), "row") => opaque.wrap(numbers, "row")
storage/hashed.py  storage/test_contract.py -k hashed
    totals > self.admission_count) => totals >= self.admission_count)
    jnp.where(strangers.is_key, new_rows, rows) => rows
    evict = self.eviction => evict = "lru"
storage/hashed_rows.py  storage/test_corners.py -k stochastic
    mix(high, low).astype(jnp.int32) => rows
storage/row_map.py  storage/test_policies.py -k never_lose
    (row_map.last_step != FREE) & (row_map.last_step != step) => row_map.last_step != FREE
storage/hashed_rows.py  storage/test_evict.py
    step - waiting.last_step > steps_to_live => step - waiting.last_step >= steps_to_live
storage/hashed.py  storage/test_admission.py
    (1.0 - probability) ** (2**bit) => probability ** (2**bit)
storage/host_cached.py  storage/test_corners.py -k leave_the_device
    row_map.add_counts(row_map.count_of(known, rows), uses) => uses
storage/logical_rows.py  storage/test_evict.py
    np.argsort(worth, kind="stable") => np.argsort(-worth, kind="stable")
collection/rows.py  storage/test_contract.py
    _, gains, _ = entry_gains(bags, NO_ROW) => gains = ids.weights
collection/asked_rows.py  storage/test_contract.py -k many
    count + jnp.sum(is_row, dtype=jnp.int32) => count
    if self.table.optimizer.moves_all_rows: => if False:
collection/asked_rows.py  storage/test_policies.py
    (rows,), order.entry_of) => (rows,), order.first_of)
storage/row_layout.py  collection/test_mesh.py
    used[owner] += table.rows => used[owner] += 0
collection/engine.py  collection/test_embeddings.py
    output[:, : feature.output_dim] => output[:, -feature.output_dim :]
collection/occurrences.py  storage/test_contract.py
    list_of(bags, index_or_padding) => list_of(bags, index)
collection/occurrences.py  storage/test_like_tables.py
    names.index(feature.table_name) => 0
parallel/exchange.py  parallel/test_rounds.py
    takes_part &= words == cuts[-1] => takes_part &= words != cuts[-1]
parallel/agreement.py  parallel/test_agreement.py
    other["widths"][name] for other => record["widths"][name] for other
checkpoint/files.py  checkpoint/test_files.py -k flipped
    is_intact = encoded(body) == data => is_intact = True
checkpoint/manager.py  checkpoint/test_manager.py
    _step(path) % self.keep_period => not _step(path) % self.keep_period
taps.py  flax/test_nnx.py
    each[0] if len(each) == 1 else combine(*each) => each[0]
    activations, recording.taps[number]) => activations, recording.taps[0])
taps.py  flax/test_wrappers.py -k outside
    rows[name] = combine(rows[name], other_rows) => rows[name] = other_rows
linen.py  flax/test_linen.py
    self.embeddings | stepped => stepped | self.embeddings
fdo/statistics.py  fdo/test_statistics.py
    max(value, current) if self.monotone => min(value, current) if self.monotone
    else -(-buffer // num_cores) => else buffer
fdo/client.py  fdo/test_clients.py
    merged = running_maximum(append_history(merged, running_maximum(history))) => merged = running_maximum(history)
sparsecore/partitioner.py  sparsecore/test_native_partitioner.py
    entries.rank < layout.spec.max_ids_per_partition => entries.rank <= layout.spec.max_ids_per_partition
    sample + placement.row_offset // num_shards => sample
sparsecore/mesh_lookup.py  sparsecore/test_flax_layers.py
    next_step(counter), => counter,
tbe/batches.py  tbe/test_bounds.py tbe/test_mesh.py
    batch = batch if is_fatal else repaired => batch = repaired
    ends = xp.where(is_last, => ends = xp.where(~is_last,
tbe/functional.py  tbe/test_states.py tbe/test_mesh.py
    is_new = state.passed_step != t => is_new = state.passed_step == t
tbe/plan.py  tbe/test_mesh.py -k looks_up
    replace(feature, combiner=plan.combiner) => replace(feature, combiner="mean")
tbe/plan.py  tbe/test_states.py -k narrower
    near_dtype=dtype if placement == "device" else near_dtype, => near_dtype=dtype,
tbe/host_rows.py  tbe/test_module.py -k without_an_optimizer
    variable.set_value(state._replace(generation=jnp.asarray(generation, jnp.uint32))) => pass
tbe/arguments.py  tbe/test_module.py tbe/test_cases.py tbe/test_construction.py
    fixed={"is_per_row": False} => fixed={"is_per_row": True}
    if has_no_mode: => if False:
    EmbOptimType.LAMB: OfferedOptimizer(core.LAMB => EmbOptimType.LAMB: OfferedOptimizer(core.AdamW
tbe/host_rows.py  tbe/test_caching.py
    np.where(is_valid, rows + reader.first_row, => np.where(is_valid, rows,
tt/cores.py  tt/test_cores.py
    d_gains + zero => 0 * d_gains + zero
tt/hot_rows.py  tt/test_hot_rows.py
    jnp.where(is_cached, directory.places, NO_ROW) => directory.places
    worth > 0, => worth >= 0,
tt/spec.py  tt/test_spec.py
    -(-n // power) * power => n // power * power
sok/lookups.py  sok/test_layers.py
    name: number + 1 for => name: number for
sok/dump.py  sok/test_dump.py -k rounded
    there.nmant > here.nmant => there.nmant < here.nmant
datasets/generated.py  datasets/test_generated.py
    rows.random(num_samples) < probability => rows.random(num_samples) < rate
plot/distributions.py  test_plot.py -k falling
    shares[shares > 0])[::-1] => shares[shares > 0])
"""
# Tests of a copy must import the copy. The finder of an editable installation would import the
# installed sources.
IN_THE_COPY = """
import importlib.util, os, pytest, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
assert importlib.util.find_spec("rsembed").origin.startswith(os.getcwd()), "the tests would not see the copy"
sys.exit(pytest.main(sys.argv[1:]))
"""


class Fault(NamedTuple):
    """A text of a file, the text that replaces it, and arguments of pytest for tests of it."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def planted(words: Sequence[str]) -> list[Fault]:
    """Faults in files whose paths have one of the words, or all faults if there are no words."""
    faults = []
    file = ""
    tests = ()
    for line in FAULTS.strip().splitlines():
        if line.startswith(" "):
            right, _, wrong = line.strip().partition(" => ")
            faults.append(Fault(file, right, wrong, tests))
        else:
            file, *words_of_tests = line.split()
            tests = tuple(f"tests/{word}" if ".py" in word else word for word in words_of_tests)
    if not words:
        return faults
    return [fault for fault in faults if any(word in fault.file for word in words)]


def asked_in_the_check(fault: Fault) -> Fault:
    """The fault with all tests of `make check`.

    Tests of its room come first, because the first test that fails ends a run.
    """
    room = Path(Path(fault.file).parts[0]).stem
    tests = (ROOT / CHECK).read_text().splitlines()
    of_room = [test for test in tests if f"/{room}" in test or f"test_{room}" in test]
    others = [test for test in tests if test not in of_room]
    return fault._replace(tests=(*of_room, *others))


def outcome_of(fault: Fault) -> str:
    """`found` if tests fail with the fault, else what went wrong."""
    source = (ROOT / "rsembed" / fault.file).read_text()
    count = source.count(fault.right)
    if count != 1:
        return f"PLANTED NOWHERE, as the text is there {count} times"
    with tempfile.TemporaryDirectory(prefix="rsembed-fault-") as folder:
        copy = Path(folder).resolve()
        for name in ("rsembed", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        # `build` has compiled programs of earlier runs.
        (ROOT / "build").mkdir(exist_ok=True)
        for name in ("pyproject.toml", "datasets", "docs", "build"):
            (copy / name).symlink_to(ROOT / name)
        (copy / "rsembed" / fault.file).write_text(source.replace(fault.right, fault.wrong))
        command = [
            sys.executable,
            "-c",
            IN_THE_COPY,
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *fault.tests,
        ]
        try:
            run = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return "found"
    if run.returncode > 1:
        return f"NOT ASKED, as pytest says: {(run.stdout + run.stderr)[-800:]}"
    return "found" if run.returncode else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.planted_faults", description="See the module's docstring."
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    faults = planted(asked.words)
    outcomes = []
    if asked.check:
        faults = [asked_in_the_check(fault) for fault in faults]
    with ThreadPoolExecutor(asked.workers) as pool:
        for fault, outcome in zip(faults, pool.map(outcome_of, faults), strict=True):
            outcomes.append(outcome)
            print(f"{outcome}  {fault.file}: {fault.right} => {fault.wrong}", flush=True)
    print(f"{outcomes.count('found')} of {len(faults)} faults found")
    return int(outcomes.count("found") < len(faults))


if __name__ == "__main__":
    sys.exit(main())
