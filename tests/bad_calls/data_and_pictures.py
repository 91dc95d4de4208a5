"""Bad data sets, pictures and commands."""

import numpy as np

from rsembed import datasets, plot
from tests.bad_calls.leaves import CommandError, command
from tests.bad_calls.world import NAN

BAD = {
    "zipf huge": (
        lambda: datasets.zipf_ids(5, 2**40, seed=0),
        ValueError, "zipf_probabilities: vocabulary_size must be in [1,", "got 1099511627776",
    ),
    "zipf exponent inf": (
        lambda: datasets.zipf_ids(5, 9, seed=0, exponent=float("inf")),
        ValueError, "zipf_probabilities: exponent must be in [0, inf), got inf.",
    ),
    "ratings exponent": (
        lambda: datasets.generated_ratings(5, 80, exponent=-1.0, seed=0),
        ValueError, "zipf_probabilities: exponent must be in [0, inf), got -1.0.",
    ),
    "movielens path missing": (
        lambda: datasets.movielens(path="nothing.zip"),
        FileNotFoundError, "movielens: path='nothing.zip' is neither an archive nor a",
    ),
    "freq NaN": (
        lambda: plot.plot_id_frequency([NAN, 2]),
        ValueError, "plot_id_frequency: counts must be finite and not negative,",
    ),
    "coverage empty": (
        lambda: plot.coverage_curve([]), ValueError, "coverage_curve: counts must be finite and not negative, and",
    ),
    "plane one": (
        lambda: plot.principal_plane([[1.0, 2.0]]),
        ValueError, "principal_plane: needs two points of two finite columns,", "got shape (1, 2)",
    ),
    "hood num": (
        lambda: plot.plot_neighbourhoods(np.eye(3), ["a", "b", "c"], num_neighbours=9),
        ValueError, "nearest_neighbours: k=9 must be from 1 to 2, the other rows",
    ),
    "treemap empty": (
        lambda: plot.treemap([], 1.0, 1.0), ValueError, "treemap: sizes must be finite and not negative, and at",
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
