"""Bad batches, and bags made of them."""

import jax
import numpy as np

import rsembed as rs
from tests.bad_calls.world import IDS, OFFSETS, batch, collection, feature, keyed, mesh, state, title


def lookup(b):
    return collection().lookup(state(), b)


def who(keys, **storage):
    return keyed(**storage).prepare({"who": keys})


def on_mesh(**c):
    return rs.EmbeddingCollection([feature(), feature("author")], mesh=mesh()).prepare(batch(**c))


B = rs.Bags.from_lists([[1, 2], [3]])

BAD = {
    "batch None": (lambda: lookup(None), TypeError, "batch, with one entry for each of ['author', 'title'], must"),
    "bags fields None": (
        lambda: title(rs.Bags(None, None)), TypeError, "feature 'title': ids of Bags must be an array, got None",
    ),
    "bags offsets text": (
        lambda: title(rs.Bags(IDS, "03")), TypeError, "feature 'title': offsets of Bags must be an array, got '03'",
    ),
    "bags weights text": (
        lambda: title(rs.Bags(IDS, OFFSETS, "abc")),
        TypeError, "feature 'title': weights of Bags must be an array of", "got 'abc' (str)",
    ),
    "bags nested": (lambda: title([B, B]), TypeError, "feature 'title': row 0 must be a flat list of ids, got"),
    "from_lists bool": (
        lambda: rs.Bags.from_lists([[True]]), TypeError, "row 0 holds bool values; ids must be integers, so hash",
    ),
    "from_lists weights scalar": (
        lambda: rs.Bags.from_lists([[1]], 1.0),
        TypeError, "weights, one list for each bag, must be a list, got 1.0", "got 1.0 (float)",
    ),
    "from_dense weights text": (
        lambda: rs.Bags.from_dense(np.ones((2,2), int), "x"),
        ValueError, "weights have shape (), ids (2, 2); they must be equal.",
    ),
    "mesh lists inside jit": (
        lambda: jax.jit(lambda x: on_mesh(title=[[x],[x]])["title"])(1),
        TypeError, "feature 'title': inside jit ids are one array, not lists of",
    ),
    "keys None": (
        lambda: who(None), TypeError, "feature 'who': ids must be Bags, an integer array or lists,", "got NoneType",
    ),
}  # fmt: skip
