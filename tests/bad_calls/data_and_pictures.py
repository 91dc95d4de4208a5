"""Bad calls of pictures, data sets and the command line."""

import contextlib
import gzip  # noqa: F401, used by calls of the table
import io
import zipfile

import matplotlib as mpl
import numpy as np

from rsembed import __main__ as cli, datasets
from tests.bad_calls.world import FOLDER, file

mpl.use("Agg")
WORDS = np.arange(20)


def command(*arguments):
    """Runs the command line, and raises its error output if its exit status is not 0."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main(list(arguments))
        except SystemExit as error:
            status = error.code
    if status:
        raise ValueError(errors.getvalue())


def zipped(members):
    """Path of a zip archive of files, from their contents by name."""
    with zipfile.ZipFile(FOLDER / "own.zip", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return FOLDER / "own.zip"


FILM_LOGS = {
    "ml-1m": {
        "ml-1m/ratings.dat": "7::30::5::1000\n",
        "ml-1m/movies.dat": "30::A::War\n",
    },
    "csv": {
        "ratings.csv": "userId,movieId,rating,timestamp\n7,30,5,1000\n",
        "movies.csv": "movieId,title,genres\n30,A,War\n",
    },
    "ml-100k": {
        "u.data": "7\t30\t5\t1000\n",
        "u.item": "30|A|01-Jan-1995||http://us.imdb.com/" + 19 * "|0" + "\n",
    },
    "recbole": {
        "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t30\t5\t1000\n",
        "ml-100k.item": "item_id:token\tmovie_title:token_seq\tclass:token_seq\n30\tA\tWar\n",
    },
}


def films(form, old, new):
    """Reads a log of one rating and one film, in which `new` replaces `old`."""
    files = FILM_LOGS[form]
    return datasets.movielens(zipped({name: files[name].replace(old, new) for name in files}))


def clicks(old, new):
    """Reads a log of three lines in Criteo's format. In the second line, `new` replaces `old`."""
    line = "\t".join(["1", "5", *[""] * 12, "68fd1e64", *[""] * 25]) + "\n"
    return datasets.criteo(file("train.txt", (line + line.replace(old, new) + line).encode()))


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
datasets.word_vectors(zipped({"glove.txt": "a 1 2"}), ["a"], dim=2)
    => ValueError: word_vectors: ... own.zip is a zip archive ... give the lines of one
datasets.word_vectors(file("own.gz", gzip.compress(9_000 * b"a 1 2\n")[:-9]), ["a"], dim=2)
    => ValueError: own.gz, line ... : the gzip file is damaged or cut
datasets.word_vectors(file("own.gz", gzip.compress(9_000 * b"a 1 2\n")[:20] + b"\xff" * 99), ["a"], dim=2)
    => ValueError: own.gz, line ... : the gzip file is damaged or cut
datasets.word_vectors(["2 2", "a 1 2"], ["a"], dim=2) => ValueError: has 1 vectors, its header says 2
datasets.word_vectors(["a 1 2", "b 1"], ["a"], dim=2)
    => ValueError: line 2: it has not a word and 2 numbers, 'b 1' ... bad_lines="skip"
words(source="folio") => ValueError: shakespeare: source must be ... 'pastiche' ... got 'folio'
words(path="x.txt") => ValueError: source='pastiche' ... drop path=
words(source="auto", path="nothing.txt") => FileNotFoundError: nothing.txt
words(source="auto", path=file("own.txt", b"\xff\xfe\xff")) => ValueError: own.txt ... not UTF-8
words(source="auto", path=file("empty.txt", b" ")) => ValueError: empty.txt ... no words
datasets.movielens(path="nothing.zip") => FileNotFoundError: movielens: path='nothing.zip' is no file of this kind
datasets.movielens(path=file("own.zip", b"no archive"))
    => ValueError: own.zip: ... neither a folder nor a zip or tar archive
datasets.movielens(file("own.zip", zipped(FILM_LOGS["ml-1m"]).read_bytes()[:-30]))
    => ValueError: own.zip: ... neither a folder nor a zip or tar archive
datasets.movielens(zipped({"ml-1m/ratings.dat": "7::30::5::1000"})) => ValueError: has 0 files ml-1m/movies.dat
datasets.movielens(file("ml-100k.inter", b"")) => ValueError: has 0 files ml-100k.item
datasets.movielens(file("u.item", b"")) => FileNotFoundError: no file of this kind: give a folder, a zip ... .inter
datasets.movielens(zipped({"u.item": ""})) => ValueError: lacks a file of ratings
datasets.movielens(zipped(FILM_LOGS["recbole"] | FILM_LOGS["ml-100k"]))
    => ValueError: several files of ratings: ml-100k.inter, u.data; give path= one
films("ml-1m", "War\n", "War\n31::B\n")
    => ValueError: movielens: ... own.zip: ml-1m/movies.dat, line 2 is '31::B', not film::title::genre
films("ml-1m", "A::War", "A::B::War") => ValueError: own.zip: ml-1m/movies.dat, line 1 is
films("ml-1m", "30::A", "x30::A") => ValueError: ml-1m/movies.dat, line 1: 'x30' is no number of a film
films("ml-1m", "War\n", f"War\n{10**30}::B::War\n") => ValueError: line 2: ... is no number
films("ml-1m", "War\n", "War\n30::B::War\n") => ValueError: line 2 repeats film 30 of line 1
films("ml-1m", "30::A::War\n", "") => ValueError: lists no film
films("ml-1m", "7::30::5::1000\n", "") => ValueError: ratings.dat has no ratings
films("ml-1m", "7::30::5::1000\n", "\n\n") => ValueError: ratings.dat has no ratings
films("ml-1m", "1000\n", "1000\n7::30\n") => ValueError: ml-1m/ratings.dat, line 2 ... 2 fields, not 4
films("ml-1m", "1000\n", "1000\n\n7::30::5::x\n") => ValueError: ratings.dat, line 3 ... 'x' is no number
films("ml-1m", "::5::", "::nan::") => ValueError: ratings.dat, line 1 ... 'nan' is no number
films("ml-1m", "7::30::", "7::30.5::") => ValueError: line 1 ... '30.5' is no whole number
films("ml-1m", "7::30::", "-7::30::") => ValueError: line 1 ... '-7' is no whole number
films("ml-1m", "::5::", "::1_0::") => ValueError: line 1 ... '1_0' is no number
films("ml-1m", "7::30::", "7::31::") => ValueError: movies.dat does not list film 31
films("ml-1m", "7::30::", "7::29::") => ValueError: movies.dat does not list film 29
films("csv", "userId,movieId", "userId,item") => ValueError: ratings.csv, line 1 lacks the column 'movieId'
films("csv", "30,5,", "30,five,") => ValueError: ratings.csv, line 2 ... 'five' is no number
films("csv", "title", "name") => ValueError: movies.csv, line 1 is 'movieId,name,genres', not
films("csv", "A,War", '"The "A": B, C",War') => ValueError: movies.csv, line 2 is no CSV
films("csv", "A,War", "A,B,War") => ValueError: movies.csv, line 2 is
films("ml-100k", "|0\n", "\n") => ValueError: u.item, line 1 is ... 19 flags
films("ml-100k", "|0\n", "|2\n") => ValueError: u.item, line 1 is ... 19 flags
films("recbole", "movie_title", "name") => ValueError: ml-100k.item, line 1 is ... without item_id, movie_title
films("recbole", "\tWar", "") => ValueError: ml-100k.item, line 2 has 2 fields, the header 3
films("recbole", "timestamp", "time") => ValueError: ml-100k.inter, line 1 lacks the column 'timestamp'
datasets.criteo("nothing.txt") => FileNotFoundError: criteo: path='nothing.txt' is no file
datasets.criteo_chunks("nothing.txt") => FileNotFoundError: criteo_chunks: path='nothing.txt' is no file
clicks("1\t5", "2\t5") => ValueError: criteo: ... train.txt, line 2: label is '2', neither 0 nor 1
clicks("1\t5\t", "1\t5\t\t") => ValueError: train.txt, line 2 has 41 fields, not 40
clicks("1\t5\t", "1\t")
    => ValueError: line 2 has 39 fields, not 40 (a log without labels, as test.txt is, cannot be trained on)
clicks("1\t5\t", "1\t5x\t") => ValueError: line 2: I1 is '5x', no number that float32 can hold
clicks("1\t5\t", "1\tnan\t") => ValueError: line 2: I1 is 'nan', no number
clicks("1\t5\t", "1\t1_0\t") => ValueError: line 2: I1 is '1_0', no number
clicks("1\t5\t", "1\t1e39\t") => ValueError: line 2: I1 is '1e39', no number
clicks("68fd1e64", "68fg1e64")
    => ValueError: line 2: C1 is '68fg1e64', no category of at most 16 hexadecimal ... rs.hash_keys
clicks("68fd1e64", "-8fd1e64") => ValueError: line 2: C1 is '-8fd1e64', no category
clicks("68fd1e64", "68 d1e64") => ValueError: line 2: C1 is '68 d1e64', no category
clicks("68fd1e64", "0" * 17) => ValueError: line 2: C1 is '00000000000000000', no category of at most 16
clicks("68fd1e64", "68fd\0e64") => ValueError: line 2: C1 is '68fd\x00e64', no category
clicks("68fd1e64", "68fd\n1e64") => ValueError: line 2 has 15 fields, not 40
datasets.criteo(file("own.csv", b"label,I1,user\n1,2,3\n"))
    => ValueError: line 1 has the column 'user', neither label, nor I1
datasets.criteo(file("own.csv", b"label,I1,I1\n1,2,3\n")) => ValueError: line 1 names a column twice
datasets.criteo(file("own.csv", b"label,I1,click\n1,2,3\n")) => ValueError: line 1 names a column twice
datasets.criteo(file("own.csv", b"label,C1\n1,a\n1"))
    => ValueError: own.csv, line 3 has 1 fields, not 2 (the file ends inside this line)
datasets.criteo(file("own.csv", b"label,C1\n")) => ValueError: own.csv has no rows
datasets.criteo(file("own.csv", b"")) => ValueError: own.csv has no rows
datasets.criteo(file("day.gz", gzip.compress(b"label,C1\n" + 9_000 * b"1,a\n")[:-9]))
    => ValueError: criteo: ... day.gz, line ... cannot be read: ... end-of-stream
datasets.criteo(file("day.gz", b"\x1f\x8b damaged")) => ValueError: day.gz, line 1 ... cannot be read
datasets.criteo(zipped({"a.txt": "", "b.txt": ""})) => ValueError: own.zip: it has no train.txt, but a.txt, b.txt
datasets.criteo(file("own.csv", b"1" * (3 << 20))) => ValueError: own.csv, line 1 has 1048576 bytes and no end
datasets.criteo(file("own.csv", b"label,C1\n1,a\n"), missing=2**64) => ValueError: criteo: missing=18446744073709551616
datasets.criteo(file("own.csv", b"label,C1\n1,a\n"), rows=0) => ValueError: criteo: rows ... 0
datasets.criteo_chunks(file("own.csv", b"label,C1\n1,a\n"), rows=0) => ValueError: criteo_chunks: rows ... 0
datasets.generated_ratings(5, 80, seed=0).law.log_odds([5], np.array([1.0])) => ValueError: log_odds ... 0 to 4
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

ACCEPTED = r"""
len(datasets.criteo(file("own.csv", b"label,C1\n1,a\n1,a"))) => 2
rs.plot.distributions.zipf_exponent([3, 1]) => rs.plot.distributions.zipf_exponent(np.array([3, 1]))
"""
