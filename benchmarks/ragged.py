"""Times ragged batches, from ids on the host to stepped tables, beside TorchRec if it is installed.

    python benchmarks/ragged.py [--rounds 4] [--parts sizes,programs,devices] [--json PATH]

26 features, each with a table of 100,000 rows of 64 and row-wise Adagrad. A step is one compiled
program: lookup, gradient (of half the squared activations) and update.

* sizes: 256 x 5 means batches of 256 samples with 5 ids a feature and sample on average, by
  Poisson's law. `prepare` of a batch as one `Bags` a feature, as lists of lists of `int`, and as one
  `rs.Jagged` for all features, each over the step. Then `prepare` of the `Jagged` with the step,
  beside TorchRec: a KeyedJaggedTensor of the same arrays, a fused collection, and backward.
  Both must give equal vectors for the first three batches.
* programs: compiled programs of the step for 25 batches whose features have about 1,024 ids.
* devices: 8 features on 4 devices that share the cores of this machine, 512 samples, lengths
  geometric with mean 4. Ids of a prepared batch over its places for ids; a step with one bag of
  20,000 ids over one without; compiled programs of the step for 16 batches.
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

NUM_TABLES, ROWS, DIM, RATE = 26, 100_000, 64, 0.01
SIZES = ((256, 5), (2048, 5), (2048, 20))
"""Samples of a batch, and ids of a feature and sample on average."""
NUM_DEVICES, NUM_SPLIT_TABLES, NUM_SPLIT_SAMPLES, LONG_BAG = 4, 8, 512, 20_000


class Drawn(NamedTuple):
    """Ragged ids: `values` feature after feature, and `lengths [features, samples]`."""

    values: np.ndarray
    lengths: np.ndarray


def names_of(num_tables: int) -> list[str]:
    """Names of features, which their tables share."""
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
    """Our tables and their compiled step. `num_programs` counts the programs that were compiled for it."""

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
            self.num_programs += 1  # jit traces the function once for every program
            activations = self.collection.lookup(state, batch)
            return activations, self.collection.update(state, batch, activations)

        self._step = step

    def prepare(self, given: Any) -> Any:
        """The batch on the device."""
        return jax.block_until_ready(self.collection.prepare(given))

    def step(self, batch: Any) -> dict[str, jax.Array]:
        """Activations; the tables are stepped."""
        activations, self.state = jax.block_until_ready(self._step(self.state, batch))
        return activations


def our_contestants(batches: list[Drawn]) -> dict[str, timing.Run]:
    """The step, `prepare` of each form, and both together for the form that TorchRec has."""
    model = Model(len(batches[0].lengths))
    bags, lists = [as_bags(own) for own in batches], [as_lists(own) for own in batches]
    prepared = [model.prepare(as_bags(own)) for own in batches]
    return {
        "step": lambda k: model.step(prepared[k]),
        "bags": lambda k: model.prepare(bags[k]),
        "lists": lambda k: model.prepare(lists[k]),
        "jagged": lambda k: model.prepare(as_jagged(batches[k])),
        "jagged, step": lambda k: model.step(model.prepare(as_jagged(batches[k]))),
    }


def torchrec_contestant(batches: list[Drawn]) -> timing.Run:
    """TorchRec's fused collection, which steps in backward; raises ImportError without it."""
    import torch
    import torchrec
    from torchrec.modules import fused_embedding_modules
    from torchrec.optim import RowWiseAdagrad

    names = names_of(len(batches[0].lengths))
    tables = fused_embedding_modules.FusedEmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]
            )
            for name in names
        ],
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": RATE},
        device=torch.device("cpu"),
    )
    for weights in tables.parameters():
        weights.data.fill_(1.0)

    def run(k: int) -> np.ndarray:
        values, lengths = (
            torch.from_numpy(batches[k].values),
            torch.from_numpy(batches[k].lengths.reshape(-1)),
        )
        outputs = tables(
            torchrec.KeyedJaggedTensor.from_lengths_sync(names, values, lengths)
        ).values()
        outputs.backward(outputs.detach())
        return outputs.detach().numpy()

    return run


def contestants_of(batches: list[Drawn]) -> dict[str, timing.Run]:
    """Ours, and TorchRec if it can be imported; both have run every batch once, so all programs are compiled."""
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
    """Times of everyone for batches of a size."""
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
    """Milliseconds, and ratios to the step or to `jagged + step`: medians, and bests in brackets."""

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
    """Programs of the step that a stream of these batches needs."""
    for drawn in batches:
        model.step(model.prepare(as_bags(drawn)))
    return model.num_programs


# On several devices


def draw_split_batches(num_batches: int, *, long_bag: int = 0) -> list[Drawn]:
    """Batches of geometric lengths; the first feature of each may have a bag of `long_bag` ids."""
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(num_batches):
        lengths = rng.geometric(0.25, (NUM_SPLIT_TABLES, NUM_SPLIT_SAMPLES))
        if long_bag:
            lengths[0, rng.integers(NUM_SPLIT_SAMPLES)] = long_bag
        batches.append(drawn_with(rng, lengths))
    return batches


def ids_a_place(prepared: Any, num_ids: int) -> float:
    """Ids of a batch over the sizes of all its integer arrays that are no offsets."""
    num_places = 0
    for path, leaf in jax.tree.leaves_with_path(prepared):
        is_integer = np.issubdtype(leaf.dtype, np.integer)
        if is_integer and "offsets" not in jax.tree_util.keystr(path):
            num_places += leaf.size
    return num_ids / num_places


def measure_devices(num_rounds: int) -> dict[str, Any]:
    """Programs, ids a place, and times of a step without and with a long bag."""
    model = Model(NUM_SPLIT_TABLES, devices=jax.devices()[:NUM_DEVICES])
    batches = draw_split_batches(16)
    record: dict[str, Any] = {"programs": num_programs(model, batches)}
    prepared = [model.prepare(as_bags(drawn)) for drawn in batches]
    filled = [
        ids_a_place(own, drawn.values.size) for own, drawn in zip(prepared, batches, strict=True)
    ]
    record["ids a place"] = float(np.mean(filled))
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
    """`measure_devices` in a process that has several devices; this one must have one."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    )
    command = [sys.executable, __file__, "child", str(num_rounds)]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def print_devices(record: dict[str, Any]) -> None:
    """Prints what `measure_devices` found."""
    ratio = record["long"]["median"] / record["step"]["median"]
    print(f"{NUM_DEVICES} devices, programs for 16 batches of 8 features: {record['programs']}")
    print(f"{NUM_DEVICES} devices, ids a place: {record['ids a place']:.2f}")
    print(
        f"{NUM_DEVICES} devices, step with a bag of {LONG_BAG:,} ids / without: {ratio:.1f}",
        flush=True,
    )


def main() -> int:
    """Prints the tables, and writes them if asked."""
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
        stream = draw_batches(256, 4, 25)  # 1,024 ids a feature on average
        records["programs"] = num_programs(Model(NUM_TABLES), stream)
        print(
            f"programs for 25 batches of 26 features, 1,024 ids each: {records['programs']}",
            flush=True,
        )
    if "devices" in parts:
        records["devices"] = in_child(options.rounds)
        print_devices(records["devices"])
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
