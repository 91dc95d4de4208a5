"""Bad data sets, pictures and commands."""

import numpy as np

import rsembed as rs
from rsembed import datasets, plot
from tests.bad_calls.leaves import WORDS, CommandError, clicks, command, windows, words
from tests.bad_calls.world import feature, table

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)
NAN = float("nan")


def one(**o):
    return rs.EmbeddingCollection([feature()], **o)


def plan(**o):
    return rs.plan_stacking([feature("a", table("s")), feature("b", table("t"))], **o)


def stored(storage, rows=9, **fields):
    return rs.EmbeddingCollection([feature(table_spec=table(storage=storage, vocabulary_size=rows, **fields))])


D = datasets


def R():
    return D.generated_ratings(5, 80, seed=0)


def hist(*a, **k):
    return R().histories(*a, **k)


BAD = {
    "zipf huge": (
        lambda: D.zipf_ids(5, 2**40, seed=0),
        ValueError, "zipf_probabilities: vocabulary_size must be in [1,", "got 1099511627776",
    ),
    "zipf exponent inf": (
        lambda: D.zipf_ids(5, 9, seed=0, exponent=float("inf")),
        ValueError, "zipf_probabilities: exponent must be in [0, inf), got inf.",
    ),
    "clicks sizes text": (
        lambda: clicks(vocabulary_sizes="99"),
        TypeError, "synthetic_clicks: vocabulary_sizes must be a list (each an", "got '99' (str)",
    ),
    "clicks samples NaN": (
        lambda: clicks(NAN), TypeError, "synthetic_clicks: num_samples must be an integer, got nan", "got nan (float)",
    ),
    "ratings exponent": (
        lambda: D.generated_ratings(5, 80, exponent=-1.0, seed=0),
        ValueError, "zipf_probabilities: exponent must be in [0, inf), got -1.0.",
    ),
    "movielens path missing": (
        lambda: D.movielens(path="nothing.zip"),
        FileNotFoundError, "movielens: path='nothing.zip' is neither an archive nor a",
    ),
    "movielens seed": (
        lambda: D.movielens(source="generated", seed=-1), ValueError, "movielens: seed must be in [0, inf), got -1.",
    ),
    "shakespeare max words 0": (
        lambda: words(max_words=0), ValueError, "shakespeare: max_words must be in [1, inf), got 0.",
    ),
    "decode None": (
        lambda: words().decode(None),
        TypeError, "Text.decode: ids must be an array of integers [*shape] or a", "got None (NoneType)",
    ),
    "word_ids text": (
        lambda: D.word_id_batches("words", 1, 2, 3),
        TypeError, "word_id_batches: word_ids must be an array of integers", "got 'words' (str)",
    ),
    "word_ids tables text": (
        lambda: D.word_id_batches(WORDS, 1, 2, 3, "1"),
        TypeError, "word_id_batches: num_tables must be an integer, got '1'", "got '1' (str)",
    ),
    "windows fraction text": (
        lambda: windows(validation_fraction="0.1"),
        TypeError, "next_word_batches: validation_fraction must be a number,", "got '0.1' (str)",
    ),
    "entropy vocab text": (
        lambda: D.unigram_entropy(WORDS, "20"),
        TypeError, "unigram_entropy: vocabulary_size must be an integer, got", "got '20' (str)",
    ),
    "id_counts vocab neg": (
        lambda: plot.id_counts(WORDS, -1), ValueError, "id_counts: vocabulary_size must be in [0, inf), got -1.",
    ),
    "freq NaN": (
        lambda: plot.plot_id_frequency([NAN, 2]),
        ValueError, "plot_id_frequency: counts must be finite and not negative,",
    ),
    "coverage empty": (
        lambda: plot.coverage_curve([]), ValueError, "coverage_curve: counts must be finite and not negative, and",
    ),
    "plot_coverage None": (
        lambda: plot.plot_coverage(None),
        TypeError, "plot_coverage: counts must be an array of numbers [vocab],", "got None (NoneType)",
    ),
    "running_mean window float": (
        lambda: plot.running_mean(np.ones(3), 1.5),
        TypeError, "running_mean: window must be an integer, got 1.5 (float).",
    ),
    "neighbours ids float": (
        lambda: plot.nearest_neighbours(np.eye(3), [0.5], 1),
        TypeError, "nearest_neighbours: ids[0] must be an integer, got 0.5", "got 0.5 (float)",
    ),
    "plane one": (
        lambda: plot.principal_plane([[1.0, 2.0]]),
        ValueError, "principal_plane: needs two points of two finite columns,", "got shape (1, 2)",
    ),
    "loss 2 axes": (
        lambda: plot.plot_loss([[1.0, 2.0]]),
        ValueError, "plot_loss: losses must be an array of numbers [points], got ",
    ),
    "row_path list": (
        lambda: plot.plot_row_path([[1, 2]]), TypeError, "plot_row_path: paths must be a mapping (each an array of",
    ),
    "limits text": (
        lambda: plot.plot_limits("abc", [1, 2, 3]),
        TypeError, "plot_limits: observed must be an array of numbers [steps]", "got 'abc' (str)",
    ),
    "hood num": (
        lambda: plot.plot_neighbourhoods(np.eye(3), ["a", "b", "c"], num_neighbours=9),
        ValueError, "nearest_neighbours: k=9 must be from 1 to 2, the other rows",
    ),
    "bytes number": (
        lambda: plot.plot_against_bytes({"a": 3}),
        TypeError, "plot_against_bytes: results['a'] must be a list (each (a", "got 3 (int)",
    ),
    "roofline secs list": (
        lambda: plot.plot_roofline(plot.lookup_work(1,1,1,4), [1.0], bytes_per_second=1.0, flops_per_second=1.0),
        TypeError, "plot_roofline: seconds must be a mapping (each a number),", "got [1.0] (list)",
    ),
    "skew text": (
        lambda: plot.load_skew("a"),
        TypeError, "load_skew: load must be an array of integers [shards], got", "got 'a' (str)",
    ),
    "treemap empty": (
        lambda: plot.treemap([], 1.0, 1.0), ValueError, "treemap: sizes must be finite and not negative, and at",
    ),
    "shard_load text": (
        lambda: plot.plot_shard_load({"a": "x"}),
        TypeError, "plot_shard_load: loads['a'] must be an array of integers", "got 'x' (str)",
    ),
    "treemap plot plan": (
        lambda: plot.plot_stack_treemap(rs.plan_stacking([feature()])),
        TypeError, "plot_stack_treemap: sizes must be a mapping (each (an", "got a value of type StackingPlan",
    ),
    "plot_buffer one axis": (
        lambda: plot.plot_buffer(np.zeros(3, int)),
        ValueError, "plot_buffer: places must be an array of integers [cores,",
    ),
    "entries uneven": (
        lambda: plot.partition_entries(np.ones((2,3,1), int), num_shards=2),
        ValueError, "partition_entries: 3 samples are dealt to 2 cores, which",
    ),
    "cmd run none": (lambda: command("run"), CommandError, "usage: rsembed run [-h] [--output OUTPUT] notebook"),
    "cmd run flag": (
        lambda: command("run", "01", "--fast"), CommandError, "usage: rsembed [-h] {doctor,run,bench,launch} ...",
    ),
    "cmd launch none": (lambda: command("launch"), CommandError, "usage: rsembed launch [-h] [--processes PROCESSES]"),
    "cmd empty": (lambda: command(""), CommandError, "usage: rsembed [-h] {doctor,run,bench,launch} ..."),
}  # fmt: skip
