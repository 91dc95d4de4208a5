"""Bad calls of statistics and limits."""

import rsembed as rs
from rsembed import fdo
from rsembed.fdo import SparseDenseMatmulInputStats
from tests.bad_calls.world import FOLDER, feature, new_path


def statistics(**changes):
    seen = {
        "max_ids_per_partition": {"word": [8, 9]},
        "max_unique_ids_per_partition": {"word": [8, 9]},
    }
    return SparseDenseMatmulInputStats(**seen | changes)


def client(name="stats"):
    return fdo.NPZFileFDOClient(str(FOLDER / name))


def reader(name, content):
    """A client of a folder with one file."""
    path = new_path(name)
    path.write_bytes(content)
    kind = fdo.CSVFileFDOClient if path.suffix == ".csv" else fdo.NPZFileFDOClient
    return kind(path.parent)


def limits(**options):
    stack = rs.plan_stacking([feature(input_shape=(8, 1))]).stacks[0].spec
    arguments = {"stacks": [stack], "statistics": statistics(), "num_sc_per_device": 1}
    return fdo.limits_from_statistics(**arguments | options)


def _two_layouts():
    made = client("layouts")
    made.record(statistics())
    made.record(statistics(max_ids_per_partition={"word": [1, 2, 3]}))


BAD = """
# Statistics
fdo.CSVFileFDOClient("/dev/null/x") => OSError: /dev/null
client("empty").load() => FileNotFoundError: empty'; publish() before load()
reader("fdo_stats_0_1_00000000_00000000.npz", b"no statistics").load() => ValueError: damaged ... CRC-32
reader("fdo_stats_0_1.csv", b"name;value\\n").load()
    => ValueError: fdo_stats_0_1.csv ... cannot be read ... starts with the line 'key,values'
reader("fdo_stats_0_1.csv", b"key,values\\nword_max_ids,x\\r\\n").load()
    => ValueError: fdo_stats_0_1.csv ... cannot be read: invalid literal
reader("fdo_stats_0_1.csv", b"key,values\\nword_max_ids,1" + b"0" * 30 + b"\\r\\n").load()
    => ValueError: fdo_stats_0_1.csv ... cannot be read: ... too large
reader("fdo_stats_0_1.csv", b"key,values\\nword_max_ids," + b"1" * 200_000 + b"\\r\\n").load()
    => ValueError: fdo_stats_0_1.csv ... cannot be read: field larger
reader("fdo_stats_0_1.csv", b"key,values\\nword_surprise,1\\r\\n").load()
    => ValueError: 'word_surprise' ends in none of _max_ids
fdo.client.merge_processes([{"t_max_ids": np.ones(1)}, {"t_max_ids": np.ones(2)}])
    => ValueError: 't_max_ids' has 2 values, but was recorded with 1 before or in another process
_two_layouts() => ValueError: 'word_max_ids' ... 3 values ... recorded with 2
client().record({"word": [1]}) => TypeError: SparseDenseMatmulInputStats ... dict
statistics().set_required_buffer_size_per_device("x", 64) => ValueError: stack 'x' ... num_sc
statistics(max_ids_per_partition=[8])
    => TypeError: SparseDenseMatmulInputStats: max_ids_per_partition must be ... got [8] (list)
statistics(max_ids_per_partition={"word": "8"})
    => TypeError: max_ids_per_partition of stack 'word' must be an array of ... got '8' (str)
client("n1").record(statistics(max_ids_per_partition={"word": [-1, 2]}))
    => ValueError: max_ids_per_partition of stack 'word' must be counts from 0 ... got [-1, 2] (list)
client("n3").record(statistics(max_ids_per_partition={"word": [NAN, 2]}))
    => ValueError: max_ids_per_partition of stack 'word' must be counts from 0 ... got [nan, 2] (list)
client("n4").record(statistics(max_ids_per_partition={"word": ["a"]}))
    => TypeError: max_ids_per_partition of stack 'word' must be an array of ... got ['a'] (list)
fdo.describe(collection(), batch()) => TypeError: describe: batches must be a list (each
fdo.describe(collection(), []) => ValueError: describe: there is no batch
fdo.describe(collection(), iter([[1, 2]])) => TypeError: batch, with one entry for each of ['author', 'title']
fdo.describe(collection(), [{"title": [[1]]}]) => ValueError: batch does not match the features: missing ['author']
fdo.describe(collection(), [{"title": [[1.5]], "author": [[1]]}]) => TypeError: feature 'title' ... row 0 holds float64
jax.jit(lambda ids: fdo.describe(collection(), [{"title": ids, "author": [[1]]}]))(np.zeros((1, 2), np.int32))
    => TypeError: feature 'title': the ids cannot be read
fdo.describe(collection(), [{"title": [[]], "author": [[]]}]).plot() => ValueError: plot: none of the tables
"""

ACCEPTED = """
limits()["word"]._asdict()
    => limits(statistics=statistics(max_ids_per_partition={"word": np.array([8, 9])}))["word"]._asdict()
"""
