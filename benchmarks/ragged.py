"""Times ragged batches, from ids on the host to updated tables, beside TorchRec if it is installed.

    python benchmarks/ragged.py [--rounds 4] [--parts sizes,programs,devices] [--json PATH]

There are 26 features. Each has a table of 100,000 rows and 64 columns, trained by row-wise Adagrad. A
step is one compiled program: a lookup, the gradient of half the squared activations, and an update.

* sizes: 256 x 5 means batches of 256 samples, with 5 ids per feature and sample on average, by a
  Poisson law. The table shows the time of `prepare` over that of the step, for a batch as one `Bags`
  for each feature, as lists of lists of `int`, and as one `rs.Jagged` for all features. Then it shows
  `prepare` of the `Jagged` with the step, and TorchRec with the same arrays as a KeyedJaggedTensor, a
  fused collection and backward. Both must return equal vectors for the first three batches.
* programs: compiled programs of the step for 25 batches. Features have about 1,024 ids.
* devices: 8 features on 4 devices that share the cores of this machine, batches of 512 samples,
  geometric lengths with mean 4. The results are the share of ids in the arrays of a prepared batch,
  the time of a step with a bag of 20,000 ids over that of a step without it, and the number of
  compiled programs of the step for 16 batches.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import timing

import rsembed as rs
from rsembed.plot.drawing import measured_on

NUM_TABLES = 26
ROWS = 100_000
DIM = 64
RATE = 0.01
# Samples of a batch, and mean number of ids per feature and sample.
SIZES = ((256, 5), (2048, 5), (2048, 20))
# For the part "devices".
NUM_DEVICES = 4
NUM_SPLIT_TABLES = 8
NUM_SPLIT_SAMPLES = 512
LONG_BAG = 20_000


class Drawn(NamedTuple):
    """Ragged ids: `values`, one feature after the other, and `lengths [features, samples]`."""

    values: np.ndarray
    lengths: np.ndarray


def names_of(num_tables: int) -> list[str]:
    """Names of the features. The table of a feature has the same name."""
    return [f"f{k:02}" for k in range(num_tables)]


def drawn_with(rng: np.random.Generator, lengths: np.ndarray) -> Drawn:
    """Uniform ids for bags of these lengths."""
    values = rng.integers(0, ROWS, int(lengths.sum()), dtype=np.int32)
    return Drawn(values, lengths.astype(np.int32))


def draw_batches(num_samples: int, mean: int, num_batches: int = timing.NUM_BATCHES) -> list[Drawn]:
    """Batches of Poisson lengths."""
    rng = np.random.default_rng(3)
    shape = (NUM_TABLES, num_samples)
    return [drawn_with(rng, rng.poisson(mean, shape)) for _ in range(num_batches)]


def as_jagged(drawn: Drawn) -> rs.Jagged:
    """All features in one pair of arrays."""
    return rs.Jagged(drawn.values, drawn.lengths.reshape(-1), features=names_of(len(drawn.lengths)))


def as_bags(drawn: Drawn) -> dict[str, rs.Bags]:
    """`Bags` by feature."""
    return dict(as_jagged(drawn))


def as_lists(drawn: Drawn) -> dict[str, list[list[int]]]:
    """A list of ids for each feature and sample."""
    return {name: bags.to_lists() for name, bags in as_bags(drawn).items()}


class Model:
    """Our tables and their compiled step. `num_programs` is the number of programs of the step."""

    def __init__(self, num_tables: int, *, devices: Sequence[Any] | None = None):
        rule = rs.optimizers.RowWiseAdagrad(RATE)
        features = []
        for name in names_of(num_tables):
            table = rs.TableSpec(
                name=name,
                vocabulary_size=ROWS,
                embedding_dim=DIM,
                optimizer=rule,
                initializer=jax.nn.initializers.constant(1.0),
            )
            features.append(rs.FeatureSpec(name=name, table_spec=table))
        mesh = None
        if devices is not None:
            mesh = jax.make_mesh((len(devices),), ("device",), devices=devices)
        self.collection = rs.EmbeddingCollection(features, mesh=mesh)
        self.state = self.collection.init(jax.random.key(0))
        self.num_programs = 0

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: Any) -> Any:
            # `jit` traces the function once for each program.
            self.num_programs += 1
            activations = self.collection.lookup(state, batch)
            return activations, self.collection.update(state, batch, activations)

        self._step = step

    def prepare(self, batch: Any) -> Any:
        """The prepared batch on the device."""
        return jax.block_until_ready(self.collection.prepare(batch))

    def step(self, batch: Any) -> dict[str, jax.Array]:
        """Updates the tables, and returns the activations."""
        activations, self.state = jax.block_until_ready(self._step(self.state, batch))
        return activations


def our_contestants(batches: list[Drawn]) -> dict[str, timing.Run]:
    """The step, `prepare` of each form, and both together for the form that TorchRec has."""
    model = Model(len(batches[0].lengths))
    bags = [as_bags(batch) for batch in batches]
    lists = [as_lists(batch) for batch in batches]
    prepared = [model.prepare(batch) for batch in bags]
    return {
        "step": lambda k: model.step(prepared[k]),
        "bags": lambda k: model.prepare(bags[k]),
        "lists": lambda k: model.prepare(lists[k]),
        "jagged": lambda k: model.prepare(as_jagged(batches[k])),
        "jagged, step": lambda k: model.step(model.prepare(as_jagged(batches[k]))),
    }


def torchrec_contestant(batches: list[Drawn]) -> timing.Run:
    """Steps of TorchRec's fused collection. Raises ImportError without TorchRec."""
    import torch
    import torchrec
    from torchrec.modules import fused_embedding_modules
    from torchrec.optim import RowWiseAdagrad

    names = names_of(len(batches[0].lengths))
    configs = []
    for name in names:
        config = torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]
        )
        configs.append(config)
    tables = fused_embedding_modules.FusedEmbeddingBagCollection(
        configs,
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": RATE},
        device=torch.device("cpu"),
    )
    for weights in tables.parameters():
        weights.data.fill_(1.0)

    def run(k: int) -> np.ndarray:
        values = torch.from_numpy(batches[k].values)
        lengths = torch.from_numpy(batches[k].lengths.reshape(-1))
        ids = torchrec.KeyedJaggedTensor.from_lengths_sync(names, values, lengths)
        outputs = tables(ids).values()
        # The tables are updated in the backward pass.
        outputs.backward(outputs.detach())
        return outputs.detach().numpy()

    return run


def contestants_of(batches: list[Drawn]) -> dict[str, timing.Run]:
    """Our contestants, and TorchRec if it can be imported.

    All contestants have run every batch once, so all programs are compiled.
    """
    runs = our_contestants(batches)
    try:
        runs["TorchRec"] = torchrec_contestant(batches)
    except (ImportError, OSError) as error:
        print(f"without TorchRec: {error}")
    for k in range(len(batches)):
        ours = np.concatenate(list(runs["jagged, step"](k).values()), axis=1)
        if "TorchRec" in runs and k < 3:
            np.testing.assert_allclose(runs["TorchRec"](k), ours, rtol=1e-4, atol=1e-5)
    return runs


def measure(num_samples: int, mean: int, num_rounds: int) -> dict[str, Any]:
    """Times of all contestants for batches of a size."""
    runs = contestants_of(draw_batches(num_samples, mean))
    record: dict[str, Any] = {"size": f"{num_samples} x {mean}"}
    for name, times in timing.race(runs, num_rounds).items():
        record[name] = times._asdict()
    return record


HEADS = ("step ms", "bags/", "lists/", "jagged/", "jagged + step ms", "TorchRec/")


def row_of(name: str, cells: Sequence[str]) -> str:
    """A row of the printed table."""
    return f"{name:<10}" + "".join(f"{cell:>18}" for cell in cells)


def cells_of(record: dict[str, Any]) -> list[str]:
    """Milliseconds, and ratios to the step or to `jagged + step`: medians, with bests in brackets."""

    def milliseconds(name: str) -> str:
        return f"{record[name]['median']:.2f} ({record[name]['best']:.2f})"

    def ratio(name: str, other: str) -> str:
        if name not in record:
            return "-"
        median = record[name]["median"] / record[other]["median"]
        best = record[name]["best"] / record[other]["best"]
        return f"{median:.2f} ({best:.2f})"

    cells = [milliseconds("step")]
    for form in ("bags", "lists", "jagged"):
        cells.append(ratio(form, "step"))
    cells.append(milliseconds("jagged, step"))
    cells.append(ratio("TorchRec", "jagged, step"))
    return cells


def print_sizes(sizes: Sequence[tuple[int, int]], num_rounds: int) -> list[dict[str, Any]]:
    """Prints the table of these sizes, and returns its records."""
    print(row_of("", HEADS))
    records = []
    for size in sizes:
        record = measure(*size, num_rounds)
        records.append(record)
        print(row_of(record["size"], cells_of(record)), flush=True)
    return records


def num_programs(model: Model, batches: Sequence[Drawn]) -> int:
    """Number of programs of the step after a stream of batches."""
    for drawn in batches:
        model.step(model.prepare(as_bags(drawn)))
    return model.num_programs


# On several devices


def draw_split_batches(num_batches: int, *, long_bag: int = 0) -> list[Drawn]:
    """Batches of geometric lengths. With `long_bag`, the first feature has one bag of this length."""
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(num_batches):
        lengths = rng.geometric(0.25, (NUM_SPLIT_TABLES, NUM_SPLIT_SAMPLES))
        if long_bag:
            lengths[0, rng.integers(NUM_SPLIT_SAMPLES)] = long_bag
        batches.append(drawn_with(rng, lengths))
    return batches


def ids_a_place(prepared: Any, num_ids: int) -> float:
    """Number of ids of a batch over the total size of its integer arrays, without offsets."""
    num_places = 0
    for path, leaf in jax.tree.leaves_with_path(prepared):
        is_integer = np.issubdtype(leaf.dtype, np.integer)
        if is_integer and "offsets" not in jax.tree_util.keystr(path):
            num_places += leaf.size
    return num_ids / num_places


def measure_devices(num_rounds: int) -> dict[str, Any]:
    """Number of programs, share of ids in arrays, and times of a step without and with a long bag."""
    model = Model(NUM_SPLIT_TABLES, devices=jax.devices()[:NUM_DEVICES])
    batches = draw_split_batches(16)
    record: dict[str, Any] = {"programs": num_programs(model, batches)}
    prepared = [model.prepare(as_bags(drawn)) for drawn in batches]
    shares = []
    for drawn, batch in zip(batches, prepared, strict=True):
        shares.append(ids_a_place(batch, drawn.values.size))
    record["ids a place"] = float(np.mean(shares))
    (with_long_bag,) = draw_split_batches(1, long_bag=LONG_BAG)
    long = model.prepare(as_bags(with_long_bag))
    runs: dict[str, timing.Run] = {
        "step": lambda k: model.step(prepared[k]),
        "long": lambda k: model.step(long),
    }
    for name, times in timing.race(runs, num_rounds).items():
        record[name] = times._asdict()
    return record


def in_child(num_rounds: int) -> dict[str, Any]:
    """The record of `measure_devices` in a process with several devices. This process has one."""
    devices = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "child", str(num_rounds)]
    child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(child.stdout.splitlines()[-1])


def print_devices(record: dict[str, Any]) -> None:
    """Prints the record of `measure_devices`."""
    ratio = record["long"]["median"] / record["step"]["median"]
    print(f"{NUM_DEVICES} devices, programs for 16 batches of 8 features: {record['programs']}")
    print(f"{NUM_DEVICES} devices, ids a place: {record['ids a place']:.2f}")
    print(
        f"{NUM_DEVICES} devices, step with a bag of {LONG_BAG:,} ids / without: {ratio:.1f}",
        flush=True,
    )


def main() -> int:
    """Prints the tables, and writes the records to the file of `--json`."""
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(measure_devices(int(sys.argv[2]))))
        return 0
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="times that all batches are run")
    parser.add_argument(
        "--parts", default="sizes,programs,devices", help="what to measure, comma-separated"
    )
    options = parser.parse_args()
    timing.check_native()
    parts = options.parts.split(",")
    records: dict[str, Any] = {"machine": measured_on()}
    print(measured_on())
    if "sizes" in parts:
        records["sizes"] = print_sizes(SIZES, options.rounds)
    if "programs" in parts:
        # A feature has 256 * 4 = 1,024 ids on average.
        batches = draw_batches(256, 4, 25)
        records["programs"] = num_programs(Model(NUM_TABLES), batches)
        workload = "25 batches of 26 features, 1,024 ids each"
        print(f"programs for {workload}: {records['programs']}", flush=True)
    if "devices" in parts:
        records["devices"] = in_child(options.rounds)
        print_devices(records["devices"])
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
