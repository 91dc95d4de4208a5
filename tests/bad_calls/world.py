"""Arguments of bad calls: small specs, collections and states. Calls share cached ones."""

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
"""A folder that is deleted when the process ends."""
KEY = jax.random.key
NAN = float("nan")


def zeros(key, shape, dtype=jnp.float32):
    """The initializer that compiles fastest."""
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
    """A collection with one feature."""
    return rs.EmbeddingCollection([feature()], **options)


def plan(t=None, **options):
    """A stacking plan of two features with a table each. `t` has fields of the second table."""
    tables = table("s"), table("t", **(t or {}))
    return rs.plan_stacking([feature("a", tables[0]), feature("b", tables[1])], **options)


@cached
def mesh(num_devices=2, axis="shard"):
    return jax.make_mesh((num_devices,), (axis,), devices=jax.devices()[:num_devices])


@cached
def collection():
    """A collection of two features and two tables. The tables share a stack."""
    return rs.EmbeddingCollection([feature(), feature("author", table("user", vocabulary_size=5))])


@cached
def other():
    """A collection with one table. A table of `collection` has its name, but another size."""
    return rs.EmbeddingCollection([feature(table_spec=table(vocabulary_size=7))])


@cached
def state():
    return collection().init(KEY(0))


@cached
def other_state():
    return other().init(KEY(0))


def started(**changes):
    """State of a collection with one table, which has these fields."""
    return rs.EmbeddingCollection([feature(table_spec=table(**changes))]).init(KEY(0))


def batch(**changes):
    return {"title": np.array([[1, 2], [3, -1]]), "author": np.array([4, 0])} | changes


def title(ids):
    """Prepares the batch, with `ids` for the feature `title`."""
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
    """A collection with a keyed table of four rows."""
    return rs.EmbeddingCollection(
        [feature("who", table("client", vocabulary_size=4, storage=rs.Hashed(**storage)))]
    )


@cached
def keyed_state():
    return keyed().init(KEY(0))


@cached
def near():
    """A collection with a table on the host, and a device cache of two rows."""
    return rs.EmbeddingCollection(
        [feature("what", table("item", storage=rs.HostCached(cache_rows=2)))]
    )


@cached
def near_state():
    return near().init(KEY(0))


def twice(output, backward):
    """Makes two steps for one lookup."""
    backward(output)
    backward(output)


def new_path(name):
    """A path in a new folder. Nothing is at the path yet."""
    return pathlib.Path(tempfile.mkdtemp(dir=FOLDER)) / name


def file(name, content):
    (FOLDER / name).write_bytes(content)
    return FOLDER / name
