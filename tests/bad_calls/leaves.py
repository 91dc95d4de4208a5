"""Bad calls of pictures, data sets and the command line."""

import contextlib
import io
import zipfile
from pathlib import Path

import matplotlib as mpl
import numpy as np

from rsembed import datasets, plot
from rsembed.__main__ import CommandError, find_notebook, main, parse_settings, replace_parameters
from tests.bad_calls.world import FOLDER

mpl.use("Agg")
NAN = float("nan")
COUNTS, IDS = np.array([3, 1, 0]), np.array([0, 1, 1, 0, 1, 0, 1, 1])
WORDS = np.arange(20)
HAS_BENCHMARKS = (Path(datasets.__file__).parents[2] / "benchmarks").is_dir()


def file(name, content):
    (FOLDER / name).write_bytes(content)
    return FOLDER / name


def command(*arguments):
    """What the command line prints as an error, raised; it returns 2 and ends with 2 where arguments are none."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(list(arguments))
        except SystemExit as error:
            status = error.code
    if status:
        raise CommandError(errors.getvalue())


def archive(rating):
    with zipfile.ZipFile(FOLDER / "own.zip", "w") as written:
        written.writestr("ml-1m/movies.dat", "1::A film::Drama\n")
        written.writestr("ml-1m/ratings.dat", rating + "\n")
    return FOLDER / "own.zip"


def odds(users, days):
    return datasets.generated_ratings(5, 80, seed=0).law.log_odds(users, np.array(days))


def words(**options):
    return datasets.shakespeare(32, **{"source": "pastiche", "max_words": 200} | options)


def windows(**options):
    return datasets.next_word_batches(WORDS, **{"batch_size": 2, "sequence_length": 3} | options)


BAD = {
    # Generated data
    "too few items": (
        lambda: datasets.generated_ratings(5, 9, seed=0), ValueError, "generated_ratings: num_items", "[40, inf)", "9",
    ),
    "more ratings than items": (
        lambda: datasets.generated_ratings(5, 80, ratings_per_user=99, seed=0), ValueError, "ratings_per_user=99",
        "half of num_items",
    ),
    # Texts and ratings
    "a source nobody knows": (lambda: words(source="folio"), ValueError, "source must be", "'pastiche'", "'folio'"),
    "a path for a bundled text": (lambda: words(path="x.txt"), ValueError, "source='pastiche'", "drop path="),
    "a path that is not there": (lambda: words(source="auto", path="nothing.txt"), FileNotFoundError, "nothing.txt"),
    "a text that is none": (
        lambda: words(source="auto", path=file("own.txt", b"\xff\xfe\xff")), ValueError, "own.txt", "not UTF-8",
    ),
    "an empty text": (lambda: words(source="auto", path=file("empty.txt", b" ")), ValueError, "empty.txt", "no words"),
    "an id without a word": (lambda: words().decode([99]), ValueError, "Text.decode: id 99 at position 0", "0 to 31"),
    "ratings nobody has": (lambda: datasets.movielens("ml-2m"), ValueError, "'ml-2m'", "name must be", "'ml-1m'"),
    "an archive that is none": (
        lambda: datasets.movielens(path=file("own.zip", b"no archive")), ValueError, "own.zip", "zip",
    ),
    "an archive of fewer columns": (
        lambda: datasets.movielens(path=archive("1::1::3")), ValueError, "has not the form of ml-1m.zip", "own.zip",
    ),
    "users outside": (lambda: odds([5], [1.0]), ValueError, "log_odds", "0 to 4"),
    # Batches of words
    "words beyond int32": (
        lambda: datasets.word_id_batches(WORDS + 2**40, 1, 2, 3), ValueError, "word_id_batches: word_ids", "int32",
    ),
    "a text too short": (
        lambda: datasets.word_id_batches(WORDS[:3], 1, 2, 3), ValueError, "3 words are too few", "seq_len=3",
    ),
    "a split nobody knows": (
        lambda: windows(split="test"), ValueError, "next_word_batches: split must be 'train' or", "got 'test'",
    ),
    "windows too long": (
        lambda: windows(sequence_length=30), ValueError, "the train part has 18 words", "sequence_length=30",
    ),
    "the entropy of nothing": (
        lambda: datasets.unigram_entropy(WORDS[:0], 9), ValueError, "unigram_entropy", "no words",
    ),
    "words outside": (
        lambda: datasets.unigram_entropy(WORDS, 9), ValueError, "unigram_entropy: ids reach from 0 to 19",
        "vocabulary_size=9",
    ),
    # Pictures
    "ids outside a picture": (
        lambda: plot.id_counts(WORDS, 9), ValueError, "id_counts: ids reach from 0 to 19", "vocabulary_size=9",
    ),
    "a law of one row": (lambda: plot.zipf_exponent(np.array([3])), ValueError, "zipf_exponent", "two rows"),
    "neighbours of a row that is not there": (
        lambda: plot.nearest_neighbours(np.eye(3), [9], 1), ValueError, "nearest_neighbours", "9", "0 to 2",
    ),
    "steps of other losses": (lambda: plot.plot_loss([1.0, 2.0], steps=[1]), ValueError, "1 steps for 2 losses"),
    "limits of other batches": (lambda: plot.plot_limits([1, 2, 3], [1, 2]), ValueError, "2 limits for 3 batches"),
    "partitions that fall": (
        lambda: plot.buffer_places(np.array([16, 2, *[16] * 6]), num_shards=2, num_places=24), ValueError,
        "buffer_places", "must not fall",
    ),
    # The command line
    "no command": (lambda: command(), CommandError, "command"),
    "a notebook nobody has": (
        lambda: command("run", "99_nothing"), CommandError, "no notebook '99_nothing'", "01_shakespeare",
    ),
    "a notebook of several": (lambda: find_notebook("0"), CommandError, "'0' could mean", "01_shakespeare"),
    "a setting without a value": (lambda: command("run", "01", "STEPS"), CommandError, "'STEPS'", "NAME=VALUE"),
    "a setting without a name": (lambda: parse_settings(["=3"]), CommandError, "'=3'", "NAME=VALUE"),
    "a parameter nobody knows": (
        lambda: replace_parameters("STEPS = 2", {"STEP": "3"}), CommandError, "unknown parameter STEP", "STEPS",
    ),
    "a value that is none": (
        lambda: replace_parameters("STEPS = 2", {"STEPS": "many"}), CommandError, "STEPS=many", "Python literal",
    ),
    "a cell of parameters that is no Python": (
        lambda: replace_parameters("%matplotlib inline\nSTEPS = 2", {"STEPS": "3"}), CommandError, "'parameters'",
        "no Python",
    ),
    "a benchmark elsewhere": (lambda: command("bench", "../rsembed/nnx"), CommandError, "no benchmark"),
    "a benchmark nobody has": (
        lambda: command("bench", "sumary"), CommandError, "no benchmark 'sumary'",
        "summary" if HAS_BENCHMARKS else "they come with a checkout",
    ),
    "a script nobody has": (lambda: command("launch", "nothing.py"), CommandError, "no script 'nothing.py'"),
    "no processes": (lambda: command("launch", "--processes", "0", "x.py"), CommandError, "num_processes", "0"),
}  # fmt: skip

ACCEPTED = {
    "ids as lists": (
        lambda: plot.id_counts([[2, 0], [2, -1]], 4), lambda: plot.id_counts(np.array([[2, 0], [2, -1]]), 4),
    ),
    "words as a list": (lambda: words().encode(["the", "x"]), lambda: words().encode("the x")),
}  # fmt: skip
