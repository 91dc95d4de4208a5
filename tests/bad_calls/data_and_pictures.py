"""Bad calls of pictures, data sets and the command line."""

import contextlib
import io
import zipfile

import matplotlib as mpl
import numpy as np

from rsembed import __main__ as cli, datasets
from tests.bad_calls.world import FOLDER

mpl.use("Agg")
WORDS = np.arange(20)


def command(*arguments):
    """What the command line prints as an error, raised; it returns 2 and ends with 2 where arguments are none."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main(list(arguments))
        except SystemExit as error:
            status = error.code
    if status:
        raise ValueError(errors.getvalue())


def archive(rating):
    with zipfile.ZipFile(FOLDER / "own.zip", "w") as written:
        written.writestr("ml-1m/movies.dat", "1::A film::Drama\n")
        written.writestr("ml-1m/ratings.dat", rating + "\n")
    return FOLDER / "own.zip"


def odds(users, days):
    return datasets.generated_ratings(5, 80, seed=0).law.log_odds(users, np.array(days))


def words(**options):
    return datasets.shakespeare(32, **{"source": "pastiche", "max_words": 200} | options)


BAD = r"""
# Generated data
datasets.generated_ratings(5, 9, seed=0) => ValueError: generated_ratings: num_items ... [40, inf) ... 9
datasets.generated_ratings(5, 80, ratings_per_user=99, seed=0) => ValueError: ratings_per_user=99 ... half of num_items
datasets.zipf_ids(5, 2**40, seed=0)
    => ValueError: zipf_probabilities: vocabulary_size must be in [1, ... got 1099511627776
# Texts and ratings
datasets.word_vectors("nothing.txt", ["a"], dim=2) => FileNotFoundError: nothing.txt
datasets.word_vectors(b"a 1 2", ["a"], dim=2) => TypeError: word_vectors: source must be ... type bytes
datasets.word_vectors([3], ["a"], dim=2) => TypeError: word_vectors: source[0] must be ... got 3 (int)
datasets.word_vectors(iter([3]), ["a"], dim=2) => TypeError: word_vectors: line 1 must be text or bytes, got 3
datasets.word_vectors(["a 1 2"], "a", dim=2) => TypeError: word_vectors: words must be a list (each a text)
datasets.word_vectors(["a 1 2"], ["a", 5], dim=2) => TypeError: word_vectors: words[1] must be a text, got 5 (int)
datasets.word_vectors(["a 1 2"], ["a"], dim=0) => ValueError: word_vectors: dim ... 0
datasets.word_vectors(["9 300", "a 1 2"], ["a"], dim=2) => ValueError: line 1: the header says 300 ... give dim=300
datasets.word_vectors(["2 2", "a 1 2"], ["a"], dim=2) => ValueError: has 1 vectors, its header says 2
datasets.word_vectors(["a 1 2", "b 1"], ["a"], dim=2)
    => ValueError: line 2: it has not a word and 2 numbers, 'b 1' ... bad_lines="skip"
words(source="folio") => ValueError: shakespeare: source must be ... 'pastiche' ... got 'folio'
words(path="x.txt") => ValueError: source='pastiche' ... drop path=
words(source="auto", path="nothing.txt") => FileNotFoundError: nothing.txt
words(source="auto", path=file("own.txt", b"\xff\xfe\xff")) => ValueError: own.txt ... not UTF-8
words(source="auto", path=file("empty.txt", b" ")) => ValueError: empty.txt ... no words
datasets.movielens(path="nothing.zip") => FileNotFoundError: movielens: path='nothing.zip' is no file of this kind
datasets.movielens(path=file("own.zip", b"no archive")) => ValueError: own.zip
datasets.movielens(path=archive("1::1::3")) => ValueError: own.zip: ml-1m/ratings.dat, line 1 ... 3 fields, not 4
datasets.movielens(path=archive("1::2::3::4")) => ValueError: movies.dat does not list film 2
datasets.criteo("nothing.txt") => FileNotFoundError: criteo: path='nothing.txt' is no file
datasets.criteo(file("own.txt", b"1\t2\n")) => ValueError: own.txt, line 1 has 2 fields, not 40
datasets.criteo(file("own.csv", b"label,C1\n1,x\n")) => ValueError: own.csv, line 2: C1 is 'x' ... rs.hash_keys
datasets.criteo(file("own.csv", b"label,C1\n1,a\n"), missing=2**64) => ValueError: criteo: missing=18446744073709551616
datasets.criteo(file("own.csv", b"label,C1\n1,a\n"), rows=0) => ValueError: criteo: rows ... 0
datasets.criteo_chunks(file("own.csv", b"label,C1\n1,a\n"), rows=0) => ValueError: criteo_chunks: rows ... 0
odds([5], [1.0]) => ValueError: log_odds ... 0 to 4
# Batches of words
datasets.word_id_batches(WORDS + 2**40, 1, 2, 3) => ValueError: word_id_batches: word_ids ... int32
datasets.word_id_batches(WORDS[:3], 1, 2, 3) => ValueError: 3 words are too few ... seq_len=3
# Pictures
rs.plot.distributions.zipf_exponent(np.array([3])) => ValueError: zipf_exponent ... two rows
rs.plot.pictures.nearest_neighbours(np.eye(3), [9], 1) => ValueError: nearest_neighbours ... 9 ... 0 to 2
rs.plot.plot_loss([1.0, 2.0], steps=[1]) => ValueError: 1 steps for 2 losses
rs.plot.plot_limits([1, 2, 3], [1, 2]) => ValueError: 2 limits for 3 batches
rs.plot.buffers.buffer_places(np.array([16, 2, *[16] * 6]), num_shards=2, num_places=24)
    => ValueError: buffer_places ... must not fall
rs.plot.buffers.buffer_places(np.full(16, 8), num_shards=3, num_places=47) => ValueError: buffer_places:
rs.plot.buffers.buffer_places(np.full(16, 8), num_shards=9, num_places=48) => ValueError: buffer_places:
rs.plot.buffers.buffer_places(np.full(16, 16), num_shards=2, num_places=16) => ValueError: buffer_places:
rs.plot.plot_buffer(np.zeros((1, 8), int), labels=np.array(["a", "b", "c"])) => ValueError: labels have shape (3,)
rs.plot.plot_shard_load({"idle": np.zeros(4, int)}) => ValueError: plot_shard_load: load
rs.plot.plot_shard_load({}) => ValueError: one number of shards
rs.plot.plot_shard_load({"two": np.ones(2, int), "three": np.ones(3, int)}) => ValueError: one number of shards
rs.plot.plot_id_frequency([NAN, 2]) => ValueError: plot_id_frequency: counts must be finite and not negative,
rs.plot.plot_coverage([3, 4], num_rows=1) => ValueError: plot_coverage: there are 2 counts, but num_rows=1
rs.plot.plot_coverage([]) => ValueError: plot_coverage: counts must be finite and not negative, and
rs.plot.pictures.principal_plane([[1.0, 2.0]])
    => ValueError: principal_plane: needs two points of two finite columns, got shape (1, 2)
rs.plot.pictures.nearest_neighbours(np.eye(3), [0], 9)
    => ValueError: nearest_neighbours: k=9 must be from 1 to 2, the other rows
rs.plot.plot_stack_treemap({}) => ValueError: treemap: sizes must be finite and not negative, and at
rs.plot.buffers.partition_entries(np.ones((2,3,1), int), num_shards=2)
    => ValueError: partition_entries: 3 samples are dealt to 2 cores, which
rs.plot.buffers.partition_entries(np.full((1, 4, 2), -1), num_shards=4) => ValueError: partition_entries
# The command line
command() => ValueError: command
command("run", "99_nothing") => ValueError: no notebook '99_nothing' ... 01_shakespeare
cli.find_notebook("0") => ValueError: '0' could mean ... 01_shakespeare
command("run", "01", "STEPS") => ValueError: 'STEPS' ... NAME=VALUE
cli.parse_settings(["=3"]) => ValueError: '=3' ... NAME=VALUE
cli.with_settings("STEPS = 2", {"STEP": "3"}) => ValueError: unknown parameter STEP ... STEPS
cli.with_settings("STEPS = 2", {"STEPS": "many"}) => ValueError: STEPS=many ... Python literal
cli.with_settings("%matplotlib inline\nSTEPS = 2", {"STEPS": "3"}) => ValueError: 'parameters' ... no Python
command("launch", "nothing.py") => ValueError: no script 'nothing.py'
command("launch", "--processes", "0", "x.py") => ValueError: num_processes ... 0
command("run") => ValueError: usage: rsembed run [-h] [--output OUTPUT] notebook
command("run", "01", "--fast") => ValueError: usage: rsembed [-h] {doctor,run,launch} ...
command("launch") => ValueError: usage: rsembed launch [-h] [--processes PROCESSES]
command("") => ValueError: usage: rsembed [-h] {doctor,run,launch} ...
"""

ACCEPTED = """
rs.plot.distributions.zipf_exponent([3, 1]) => rs.plot.distributions.zipf_exponent(np.array([3, 1]))
"""
