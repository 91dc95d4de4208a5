"""Bad calls of statistics and limits."""

import rsembed as rs
from rsembed import fdo
from rsembed.fdo import SparseDenseMatmulInputStats
from tests.bad_calls.world import FOLDER, feature


def statistics(**changes):
    seen = {
        "max_ids_per_partition": {"word": [8, 9]},
        "max_unique_ids_per_partition": {"word": [8, 9]},
    }
    return SparseDenseMatmulInputStats(**seen | changes)


def client(name="stats"):
    return fdo.NPZFileFDOClient(str(FOLDER / name))


def unread():
    """A folder with a file of statistics that was changed."""
    made = client("changed")
    made.record(statistics())
    made.publish()
    (file,) = (FOLDER / "changed").glob("*.npz")
    file.write_bytes(b"no statistics")
    return made.load()


def limits(**options):
    stack = rs.plan_stacking([feature(input_shape=(8, 1))]).stacks[0].spec
    given = {"stacks": [stack], "statistics": statistics(), "num_sc_per_device": 1}
    return fdo.limits_from_statistics(**given | options)


def _two_layouts():
    made = client("layouts")
    made.record(statistics())
    made.record(statistics(max_ids_per_partition={"word": [1, 2, 3]}))


BAD = """
# Statistics
fdo.CSVFileFDOClient("/dev/null/x") => OSError: /dev/null
client("empty").load() => FileNotFoundError: empty'; publish() before load()
unread() => ValueError: damaged ... CRC-32
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
fdo.describe(collection(), [{"title": [[]], "author": [[]]}]).plot() => ValueError: plot: none of the tables
"""

ACCEPTED = """
limits()["word"]._asdict()
    => limits(statistics=statistics(max_ids_per_partition={"word": np.array([8, 9])}))["word"]._asdict()
"""
