"""Times how long a program takes to start: the import, `doctor`, and 200 tables of different dims.

    python benchmarks/starting.py [--tables 200] [--rounds 3] [--json PATH]

The import is counted beyond jax, flax and optax. Tables have 1,000 rows, and dims from 8 upwards.
A step is a lookup, the gradient of half the squared activations, and an update. This gradient is
equal to the activations. Any operation on the activations of 200 tables would add 200 loops, and
XLA takes 5 to 30 ms to compile one of them. Every number is the smallest of all rounds, in seconds of
processor time, which other programs disturb less than the time on the clock. Each round is a new
process. Let Python write bytecode (`PYTHONDONTWRITEBYTECODE` is not set), as an installation does.
"""

from __future__ import annotations

import json
import subprocess
import sys

import timing

IMPORT = """
import json, time
import jax, flax, optax
start = time.process_time()
import rsembed
print(json.dumps({"import rsembed": time.process_time() - start}))
"""

DOCTOR = """
import contextlib, io, json, time
from rsembed.__main__ import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["doctor"])
print(json.dumps({"rsembed doctor": time.process_time()}))
"""

TABLES = """
import functools, json, sys, time
import jax
import numpy as np
import rsembed as rs

rule = getattr(rs.optimizers, sys.argv[1])(0.1)
features = []
for number in range(int(sys.argv[2])):
    table = rs.TableSpec(f"t{number}", 1000, 8 + number, optimizer=rule)
    features.append(rs.FeatureSpec(name=f"f{number}", table_spec=table))
collection = rs.EmbeddingCollection(features)
seconds = {}


def timed(what, function, *args):
    start = time.process_time()
    result = jax.block_until_ready(function(*args))
    seconds[f"{sys.argv[1]}: {what}"] = time.process_time() - start
    return result


@functools.partial(jax.jit, donate_argnums=0)
def train(state, batch):
    activations, pullback = collection.lookup_vjp(state, batch)
    return collection.apply(state, pullback(activations))


state = timed("init", collection.init, jax.random.key(0))
ids = np.random.default_rng(0).integers(0, 1000, (64, 4))
batch = collection.prepare({feature.name: ids for feature in features})
for what in ("first step", "second step"):
    state = timed(what, train, state, batch)
print(json.dumps(seconds))
"""


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--tables", type=int, default=200, help="number of tables")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each number")
    options = parser.parse_args()
    programs = [
        (IMPORT,),
        (DOCTOR,),
        (TABLES, "SGD", str(options.tables)),
        (TABLES, "Adagrad", str(options.tables)),
    ]
    records = []
    for program in programs:
        smallest: dict[str, float] = {}
        for _ in range(options.rounds):
            command = [sys.executable, "-c", *program]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for what, seconds in json.loads(done.stdout).items():
                smallest[what] = min(seconds, smallest.get(what, seconds))
        for what, seconds in smallest.items():
            print(f"{what:<24}{seconds:8.2f}", flush=True)
            records.append({"what": what, "tables": options.tables, "seconds": seconds})
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
