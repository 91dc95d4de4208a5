"""Times the host partitioner beside that of jax-tpu-embedding, with the same ids.

    TF_CPP_MIN_LOG_LEVEL=2 python benchmarks/preprocessing.py [--quick] [--workloads 16384x10,4096x10,...] [--json PATH]

Both are called by `preprocess_sparse_dense_matmul_input` with equal specs: 26 features with a table of
a million rows and 16 columns each, combiner "sum", one device with 4 cores. The int32 ids are drawn by
a Zipf law with exponent 1.2, and frequent ids are spread over the table. The statistics of a first,
untimed call set limits and buffer sizes, so that nothing is dropped. Then the two take turns. The table
shows medians: processor time of all threads per id, and time on the clock. Both must return the same
row pointers, ids, samples and gains in all defined entries of the buffers. The environment variable
silences warnings about buffers that are not full.

jax-tpu-embedding 0.2.0 needs Linux on x86-64 and Python 3.12: `pip install jax-tpu-embedding==0.2.0`.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import numpy as np
from timing import make_parser, write_records

from rsembed.sparsecore import (
    embedding as our_embedding,
    embedding_spec as our_specs,
    native_partitioner,
)

NUM_CORES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Features with one table each, and a batch of their ids."""

    name: str
    batch_size: int
    ids_per_sample: int = 10
    num_features: int = 26
    vocabulary_size: int = 1_000_000
    combiner: str = "sum"
    law: str = "zipf"
    has_weights: bool = False
    is_stacked: bool = False

    @property
    def num_ids(self) -> int:
        return self.num_features * self.batch_size * self.ids_per_sample


WORKLOADS = (
    Workload(name="16384x10", batch_size=16384),
    Workload(name="4096x10", batch_size=4096),
    Workload(name="16384x1", batch_size=16384, ids_per_sample=1),
    Workload(name="mean", batch_size=16384, combiner="mean"),
    Workload(name="weights", batch_size=16384, has_weights=True),
    Workload(name="uniform", batch_size=16384, law="uniform"),
    Workload(name="stacked", batch_size=16384, is_stacked=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """A library with specs and a batch of a workload."""

    embedding: Any
    specs: dict[str, Any]
    batch: dict[str, np.ndarray]
    weights: dict[str, np.ndarray] | None

    def run(self, *, allow_id_dropping: bool = False) -> tuple[Any, Any]:
        return self.embedding.preprocess_sparse_dense_matmul_input(
            self.batch,
            self.weights,
            self.specs,
            1,
            1,
            num_sc_per_device=NUM_CORES,
            allow_id_dropping=allow_id_dropping,
        )


def draw_batch(workload: Workload) -> dict[str, np.ndarray]:
    """Ids of each feature."""
    generator = np.random.default_rng(0)
    shape = (workload.batch_size, workload.ids_per_sample)
    batch = {}
    for k in range(workload.num_features):
        if workload.law == "uniform":
            ids = generator.integers(0, workload.vocabulary_size, shape)
        else:
            # The product spreads frequent ids over the vocabulary.
            products = generator.zipf(1.2, shape).astype(np.uint64) * np.uint64(2654435761)
            ids = products % np.uint64(workload.vocabulary_size)
        batch[f"feature_{k:02}"] = ids.astype(np.int32)
    return batch


def make_contestant(
    workload: Workload,
    embedding: Any,
    specs: Any,
    batch: dict[str, np.ndarray],
    weights: dict[str, np.ndarray] | None,
) -> Contestant:
    """Specs of one library, with limits and buffer sizes from the statistics of the batch."""
    # Limits of the first call: all ids of a core could be in one partition, so nothing is dropped. The
    # limits are multiples of 8.
    limit = 8 * -(-workload.batch_size * workload.ids_per_sample // (8 * NUM_CORES))
    features = {}
    for name in batch:
        table = specs.TableSpec(
            name=name.replace("feature", "table"),
            vocabulary_size=workload.vocabulary_size,
            embedding_dim=16,
            initializer=lambda key, shape: np.zeros(shape, np.float32),
            optimizer=specs.SGDOptimizerSpec(learning_rate=0.01),
            combiner=workload.combiner,
            max_ids_per_partition=limit,
            max_unique_ids_per_partition=limit,
        )
        features[name] = specs.FeatureSpec(
            name=name,
            table_spec=table,
            input_shape=(workload.batch_size, workload.ids_per_sample),
            output_shape=(workload.batch_size, 16),
        )
    if workload.is_stacked:
        embedding.auto_stack_tables(
            features,
            global_device_count=1,
            num_sc_per_device=NUM_CORES,
            stack_to_max_ids_per_partition=lambda *_: limit * workload.num_features,
            stack_to_max_unique_ids_per_partition=lambda *_: limit * workload.num_features,
            activation_mem_bytes_limit=2**40,
        )
    embedding.prepare_feature_specs_for_training(
        features, global_device_count=1, num_sc_per_device=NUM_CORES
    )
    contestant = Contestant(embedding=embedding, specs=features, batch=batch, weights=weights)
    _, counts = contestant.run(allow_id_dropping=True)
    embedding.update_preprocessing_parameters(features, counts, NUM_CORES)
    return contestant


def check_equal(ours: Any, theirs: Any) -> int:
    """Number of entries of the buffers that were compared.

    Raises: ValueError: some entries differ.
    """
    num_compared = 0
    for stack, pointers in ours.lhs_row_pointers.items():
        if not np.array_equal(pointers, theirs.lhs_row_pointers[stack]):
            raise ValueError(f"row pointers of stack {stack!r} differ")
        # The end of the last partition of each core. The rest of a core's buffer is undefined.
        ends = pointers.reshape(NUM_CORES, -1)[:, -1]
        for field in ("lhs_embedding_ids", "lhs_sample_ids", "lhs_gains"):
            our_values = np.asarray(getattr(ours, field)[stack]).reshape(NUM_CORES, -1)
            their_values = np.asarray(getattr(theirs, field)[stack]).reshape(NUM_CORES, -1)
            if our_values.shape != their_values.shape:
                raise ValueError(
                    f"{field} of stack {stack!r} has {our_values.size} and {their_values.size} entries"
                )
            for core, end in enumerate(ends):
                check_core(field, stack, core, our_values[core, :end], their_values[core, :end])
                num_compared += int(end)
    return num_compared


def check_core(field: str, stack: str, core: int, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Raises: ValueError: the defined entries of a buffer differ between the libraries."""
    is_equal = ours == theirs
    if field == "lhs_gains":
        # The libraries add gains in different orders.
        is_equal = np.isclose(ours, theirs, 2e-6, 0, equal_nan=True)
    if not is_equal.all():
        entry = int(np.argmin(is_equal))
        raise ValueError(f"{field} of stack {stack!r} differ at entry {entry} of core {core}")


def time_calls(
    contestants: dict[str, Contestant], num_rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each contestant: processor time and time on the clock."""
    processor_times: dict[str, list[float]] = {name: [] for name in contestants}
    wall_times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(num_rounds):
        for name, contestant in contestants.items():
            wall = time.perf_counter()
            processor = time.process_time()
            result = contestant.run()
            processor_times[name].append(time.process_time() - processor)
            wall_times[name].append(time.perf_counter() - wall)
            # The memory of the result is freed before the next contestant runs.
            del result
    medians = {}
    for name in contestants:
        processor = statistics.median(processor_times[name])
        medians[name] = (processor, statistics.median(wall_times[name]))
    return medians


def measure(workload: Workload, peer: Any, peer_specs: Any, num_rounds: int) -> dict:
    """The record of a workload. Both results are compared first."""
    batch = draw_batch(workload)
    weights = None
    if workload.has_weights:
        generator = np.random.default_rng(1)
        weights = {}
        for name, ids in batch.items():
            weights[name] = generator.random(ids.shape, np.float32) + np.float32(0.5)
    contestants = {
        "ours": make_contestant(workload, our_embedding, our_specs, batch, weights),
        "peer": make_contestant(workload, peer, peer_specs, batch, weights),
    }
    our_result, _ = contestants["ours"].run()
    peer_result, _ = contestants["peer"].run()
    record: dict[str, Any] = {
        "workload": workload.name,
        "num_ids": workload.num_ids,
        "places_compared": check_equal(our_result, peer_result),
    }
    for name, (processor, wall) in time_calls(contestants, num_rounds).items():
        record[name] = {
            "cpu_nanoseconds_per_id": processor / workload.num_ids * 1e9,
            "wall_milliseconds": wall * 1e3,
        }
    print(format_record(record), flush=True)
    return record


def format_record(record: dict) -> str:
    """A row of the printed table."""
    row = f"{record['workload']:<10}{record['num_ids']:>10}"
    for unit in ("cpu_nanoseconds_per_id", "wall_milliseconds"):
        ours = record["ours"][unit]
        peer = record["peer"][unit]
        row += f"{ours:>11.1f}{peer:>11.1f}{ours / peer:>7.2f}"
    return row + f"{record['places_compared']:>15}"


def import_peer() -> tuple[Any, Any]:
    """The modules of jax-tpu-embedding. Raises: ImportError: it is not installed."""
    from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

    return embedding, embedding_spec


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    names = [workload.name for workload in WORKLOADS]
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 20")
    parser.add_argument(
        "--workloads", default=",".join(names[:2]), help=f"comma-separated, of {', '.join(names)}"
    )
    parser.add_argument("--rounds", type=int, default=None, help="timed calls (default 20)")
    options = parser.parse_args()
    chosen = options.workloads.split(",")
    unknown = set(chosen) - set(names)
    if unknown:
        parser.error(f"unknown workloads {sorted(unknown)}; choose from {', '.join(names)}")
    reason = native_partitioner.unavailable_because()
    if reason is not None:
        print(f"rsembed's native host partitioner is not available: {reason}", file=sys.stderr)
        return 1
    try:
        peer, peer_specs = import_peer()
    except ImportError as error:
        print(
            f"jax-tpu-embedding is not installed ({error}). It needs Linux on x86-64 and Python 3.12 "
            f"or newer (this is {sys.version.split()[0]}): pip install jax-tpu-embedding==0.2.0",
            file=sys.stderr,
        )
        return 1
    num_rounds = options.rounds
    if not num_rounds:
        num_rounds = 5 if options.quick else 20
    print(f"{'':<20}{'cpu, nanoseconds per id':>29}{'wall, milliseconds':>29}")
    heads = f"{'ours':>11}{'peer':>11}{'ratio':>7}"
    print(f"{'workload':<10}{'ids':>10}{heads}{heads}{'equal entries':>15}")
    records = []
    for workload in WORKLOADS:
        if workload.name in chosen:
            records.append(measure(workload, peer, peer_specs, num_rounds))
    write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
