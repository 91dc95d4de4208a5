"""Bad calls of functions that save, load and keep checkpoints."""

import json
import shutil
from functools import cache

import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed import checkpoint
from tests.bad_calls.world import FOLDER, KEY, collection, feature, new_path, state, table

ARRAYS = {"x": np.arange(6.0, dtype=np.float32), "y": np.ones((2, 2), np.float32)}


def fresh():
    return new_path("saved")


@cache
def saved():
    checkpoint.save_collection(path := fresh(), collection(), state(), others={"w": jnp.ones(3)})
    return path


@cache
def arrays():
    checkpoint.save(path := fresh(), ARRAYS, step=3, metadata={"rate": 0.1})
    return path


def damaged(change):
    """A copy of a checkpoint, after `change(path)`."""
    path = fresh()
    shutil.copytree(arrays(), path)
    change(path)
    return path


def flipped(path):
    file = max(path.rglob("*"), key=lambda file: len(file.parts))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def forged(change):
    """A copy of a checkpoint with a changed manifest, whose new checksum is correct."""

    def write(path):
        file = path / "manifest.json"
        body = json.loads(file.read_text())["manifest"]
        change(body)
        file.write_bytes(checkpoint.files.encoded(body))

    return damaged(write)


def moved(before, after):
    """Saves a table with the spec `before`, and loads it into a table with the spec `after`."""
    one, other = (rs.EmbeddingCollection([feature(table_spec=table)]) for table in (before, after))
    checkpoint.save_collection(path := fresh(), one, one.init(KEY(0)))
    return checkpoint.load_collection(path, other, resize=True)


def train(*factors):
    return table(storage=rs.tt.TensorTrain((2,), factors, (2, 2)))


USER = feature("author", table("user", vocabulary_size=5))


def load_into(*features, **options):
    return checkpoint.load_collection(saved(), rs.EmbeddingCollection(list(features)), **options)


def manager(folder=None, **options):
    return checkpoint.CheckpointManager(fresh() if folder is None else folder, **options)


@cache
def kept():
    return manager(FOLDER / "kept")


def of_one_step(name):
    """A manager with one checkpoint, whose folder was renamed to `name`."""
    one = manager()
    one.save(ARRAYS, step=5)
    one.wait_until_finished()
    (one.folder / "step_000000005").rename(one.folder / name)
    return one


def closed():
    one = manager()
    one.close()
    return one


class Alike(str):
    def __str__(self):
        return "alike"


BAD = """
# Saving
checkpoint.save(arrays(), ARRAYS)
    => FileExistsError: saved exists ... never replaced ... load_collection ... CheckpointManager
checkpoint.save("/dev/null/x", ARRAYS) => OSError: /dev/null
checkpoint.save(fresh(), {"x": "text"}) => TypeError: 'x' ... text
checkpoint.save(fresh(), {"1": ARRAYS["x"], "a": {}} | {1: ARRAYS["x"]}) => TypeError: keys ... order ... texts
checkpoint.save(fresh(), {Alike("a"): ARRAYS["x"], Alike("b"): ARRAYS["x"]})
    => ValueError: two leaves ... called ['alike']
checkpoint.save(fresh(), {"a": np.zeros(2, [("id", np.int32)])}) => TypeError: 'a' is ... fields of a record
checkpoint.save(fresh(), {"a": np.zeros(2, "V8")}) => TypeError: leaf 'a' is ... only arrays of numbers
checkpoint.save(fresh(), {"a": np.asarray(["2026-01-01"], "datetime64[D]")}) => TypeError: leaf 'a' is datetime64
checkpoint.save(fresh(), ARRAYS, metadata={"x": np.ones(1)}) => TypeError: metadata ... JSON ... ndarray
checkpoint.save(fresh(), keyed_state()) => ValueError: 'client' ... save_collection
checkpoint.save_collection(fresh(), collection(), other_state()) => ValueError: does not belong to this collection
# Loading
checkpoint.load(FOLDER / "nothing") => FileNotFoundError: nothing ... no checkpoint ... manifest.json
checkpoint.load(arrays() / "manifest.json") => FileNotFoundError: no checkpoint
checkpoint.load(damaged(flipped)) => CorruptCheckpointError: saved ... 'x'
checkpoint.load(damaged(lambda path: (path / "manifest.json").write_text("{")))
    => CorruptCheckpointError: manifest.json ... older checkpoint
checkpoint.load(damaged(lambda path: shutil.rmtree(path / "0000"))) => CorruptCheckpointError: 0000 ... 'x'
checkpoint.load(forged(lambda body: body.update(layout_version=99)))
    => ValueError: layout 99 ... version that wrote it
checkpoint.load(forged(lambda body: body["arrays"][0].update(path=["y", "z"])))
    => CorruptCheckpointError: manifest.json ... 'y' is an array, and so is 'y/z'
checkpoint.load(arrays(), like=ARRAYS | {"x": np.ones(7, np.float32)})
    => ValueError: 'x' is float32[6], wanted float32[7]
checkpoint.load(saved(), like=collection()) => TypeError: like ... collection.template; load_collection
checkpoint.load_collection(saved(), other())
    => ValueError: tables/user is not expected ... word/vocabulary_size is 9, expected 7 ... collection.with_tables
load_into(feature(), USER, feature("new", table("new")))
    => ValueError: tables/new is missing ... collection.with_tables
load_into(feature(table_spec=table(dtype="bfloat16")), USER)
    => ValueError: tables/word/dtype is "float32", expected "bfloat16" ... collection.with_tables
checkpoint.load_collection(arrays(), collection())
    => ValueError: does not match: tables/user is missing ... load(path).tree
load_into(feature(table_spec=table(optimizer=rs.optimizers.Adam(0.1))), USER) => ValueError: SGD", expected "Adam"
checkpoint.load_collection(saved(), collection(), resize="grow")
    => ValueError: resize must be True or False or 'shrink', got 'grow'
load_into(feature(table_spec=table(vocabulary_size=10)), USER)
    => ValueError: vocabulary_size is 9, expected 10 ... load_collection(..., resize=True) ... slots=slots
load_into(feature(table_spec=table(vocabulary_size=8)), USER, resize=True)
    => ValueError: table 'word' has vocabulary_size=9 in the file and 8 here; ... resize='shrink' ... last 1 rows
moved(train(5, 2), train(4, 3)) => ValueError: tables/word/storage ... tt_p_shapes=(5, 2) ... (4, 3)
moved(table(initializer=jax.nn.initializers.constant(1e6)), table(dtype="float16"))
    => ValueError: table 'word': ... too large for float16
kept().restore(resize=True) => ValueError: restore: resize is of a collection's tables; leave it out for a tree
load_into(feature(table_spec=table(storage=rs.Hashed())), USER) => ValueError: word/storage ... rows by key
checkpoint.load_collection(saved(), collection(), others={"w": jnp.ones(4)})
    => ValueError: 'others/w' is float32[3], wanted float32[4]
checkpoint.manifest(FOLDER) => FileNotFoundError: no checkpoint
# Managers
kept().save(ARRAYS) => ValueError: a tree needs step
[kept().save(ARRAYS, step=1) for _ in range(2)] => FileExistsError: step_000000001 ... never replaced
kept().restore(step=9) => FileNotFoundError: step_000000009
of_one_step("step_5").restore() => FileNotFoundError: step_<9 digits>
kept().restore(others=ARRAYS) => ValueError: of a tree ... like alone
jax.jit(lambda x: kept().save({"x": x}, step=7))(ARRAYS["x"]) => RuntimeError: 'x' ... outside of jit
manager(kept().folder) => RuntimeError: another ... kept
manager(read_only=True).save(ARRAYS, step=1) => RuntimeError: only reads ... without read_only=True
closed().save(ARRAYS, step=1) => RuntimeError: closed ... another CheckpointManager
checkpoint.save(fresh(), {"x": np.array([None])}) => TypeError: checkpoint: leaf 'x' is object, made of a ndarray; only
checkpoint.save(fresh(), {"x": np.ma.masked_equal([1,2], 1)})
    => TypeError: checkpoint: leaf 'x' is int64, made of a MaskedArray; only ... data and mask
checkpoint.save(fresh(), {"x": np.zeros(2, np.longdouble)}) => TypeError: leaf 'x' is ... only arrays ... zarr
checkpoint.save(fresh(), ARRAYS, metadata={"x": {1}})
    => TypeError: checkpoint: metadata must be what JSON can hold: Object of
checkpoint.save_collection(fresh(), collection(), state()._replace(slots={}))
    => ValueError: the state does not belong to this collection: slots are {},
checkpoint.save_collection(fresh(), collection(), state()._replace(slots=None))
    => ValueError: the state does not belong to this collection: slots are
checkpoint.save_collection(fresh(), collection(), state(), others={"x": "text"})
    => TypeError: checkpoint: leaf 'others/x' is <U4, made of a str; only
checkpoint.load(file("a.bin", b"1")) => FileNotFoundError: is no checkpoint: it has no manifest.json. An interrupted
checkpoint.load_collection(saved(), collection(), others="w")
    => ValueError: does not match: 'others' is missing; 'others/w' is not
manager(collection=collection()).save(ARRAYS, step=1) => ValueError: a state has its own step; leave step out.
"""


def reloaded(path, **changes):
    checkpoint.save(path, **{"tree": ARRAYS, "step": 3} | changes)
    return checkpoint.load(path)


ACCEPTED = """
reloaded(str(fresh())).tree => reloaded(fresh()).tree
reloaded(fresh(), step=np.int64(3)).step => reloaded(fresh()).step
checkpoint.load(arrays(), like=jax.eval_shape(lambda: ARRAYS)).tree["x"] => jnp.asarray(ARRAYS["x"])
collection().tables(checkpoint.load_collection(saved(), collection())) => collection().tables(state())
"""
