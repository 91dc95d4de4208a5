"""What bad calls are made with: small specs, collections and states, each made when the first call wants it."""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs

cached = functools.cache
_folder = tempfile.TemporaryDirectory(prefix="rsembed-bad-calls-")
FOLDER = pathlib.Path(_folder.name)
"""Goes with the process."""
KEY = jax.random.key
NAN = float("nan")


def zeros(key, shape, dtype=jnp.float32):
    """Initial values that are compiled soonest."""
    return jnp.zeros(shape, dtype)


def table(name="word", **changes):
    return rs.TableSpec(
        **{"name": name, "vocabulary_size": 9, "embedding_dim": 4, "initializer": zeros}
        | {"optimizer": rs.optimizers.SGD(0.1)}
        | changes
    )


def feature(name="title", table_spec=None, **changes):
    return rs.FeatureSpec(name=name, table_spec=table_spec or table(), **changes)


def one(**options):
    """A collection of one feature."""
    return rs.EmbeddingCollection([feature()], **options)


def plan(t=None, **options):
    """A plan of two features, each with a table of its own, the second with the fields `t`."""
    tables = table("s"), table("t", **(t or {}))
    return rs.plan_stacking([feature("a", tables[0]), feature("b", tables[1])], **options)


@cached
def mesh(num_devices=2, axis="shard"):
    return jax.make_mesh((num_devices,), (axis,), devices=jax.devices()[:num_devices])


@cached
def collection():
    """Two features of two tables that share a stack."""
    return rs.EmbeddingCollection([feature(), feature("author", table("user", vocabulary_size=5))])


@cached
def other():
    """A collection whose one table has the name but not the size of another's."""
    return rs.EmbeddingCollection([feature(table_spec=table(vocabulary_size=7))])


@cached
def state():
    return collection().init(KEY(0))


@cached
def other_state():
    return other().init(KEY(0))


def started(**changes):
    """The state of one table with these changes."""
    return rs.EmbeddingCollection([feature(table_spec=table(**changes))]).init(KEY(0))


def batch(**changes):
    return {"title": np.array([[1, 2], [3, -1]]), "author": np.array([4, 0])} | changes


def title(ids):
    """The batch with these ids, checked."""
    return collection().prepare(batch(title=ids))


def gradients(**changes):
    return {"title": np.ones((2, 4), np.float32), "author": np.ones((2, 4), np.float32)} | changes


@cached
def row_gradients():
    return collection().row_gradients(batch(), gradients())


@cached
def other_row_gradients():
    return other().row_gradients({"title": np.array([1])}, {"title": np.ones((1, 4), np.float32)})


@cached
def keyed(**storage):
    """A table of keys of 64 bits with room for four."""
    return rs.EmbeddingCollection(
        [feature("who", table("client", vocabulary_size=4, storage=rs.Hashed(**storage)))]
    )


@cached
def keyed_state():
    return keyed().init(KEY(0))


@cached
def near():
    """A table on the host of which two rows are near."""
    return rs.EmbeddingCollection(
        [feature("what", table("item", storage=rs.HostCached(cache_rows=2)))]
    )


@cached
def near_state():
    return near().init(KEY(0))


def twice(output, backward):
    """Two steps for one lookup."""
    backward(output)
    backward(output)


def new_path(name):
    """In a folder of its own, which is there."""
    return pathlib.Path(tempfile.mkdtemp(dir=FOLDER)) / name


def file(name, content):
    (FOLDER / name).write_bytes(content)
    return FOLDER / name
