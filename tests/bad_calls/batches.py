"""Bad batches, and bags made of them."""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from tests.bad_calls.world import batch, collection, feature, keyed, mesh, state, table, title

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)
NAN = float("nan")


def one(**o):
    return rs.EmbeddingCollection([feature()], **o)


def plan(**o):
    return rs.plan_stacking([feature("a", table("s")), feature("b", table("t"))], **o)


def stored(storage, rows=9, **fields):
    return rs.EmbeddingCollection([feature(table_spec=table(storage=storage, vocabulary_size=rows, **fields))])


def lookup(b):
    return collection().lookup(state(), b)


def who(keys, **storage):
    return keyed(**storage).prepare({"who": keys})


def on_mesh(**c):
    return rs.EmbeddingCollection([feature(), feature("author")], mesh=mesh()).prepare(batch(**c))


def plain(combiner="none"):
    return rs.EmbeddingCollection([feature(table_spec=table(combiner=combiner))])


def dct(x):
    return rs.EmbeddingCollection([feature(input_shape=(8, 1))]).prepare({"title": x})


B = Bags.from_lists([[1, 2], [3]])

BAD = {
    "batch None": (lambda: lookup(None), TypeError, "batch, with one entry for each of ['author', 'title'], must"),
    "batch array": (
        lambda: lookup(np.array([[1,2]])), TypeError, "batch, with one entry for each of ['author', 'title'], must",
    ),
    "ids None": (
        lambda: title(None), TypeError, "feature 'title': ids must be Bags, an integer array or", "got NoneType",
    ),
    "ids dict": (
        lambda: title({"ids": [1]}), TypeError, "feature 'title': ids must be Bags, an integer array or", "got dict",
    ),
    "ids datetime": (
        lambda: title(np.array(["2020-01-01", "2020-01-02"], "datetime64[D]")),
        TypeError, "feature 'title': ids must be integers, got datetime64[D];",
    ),
    "ids -2": (
        lambda: title(np.array([[1, -2], [1, 1]])),
        ValueError, "feature 'title': id -2 in sample 0 is outside table 'word'",
    ),
    "ids zero axes": (
        lambda: title(np.array(3)),
        ValueError, "feature 'title': dense ids must have one or two axes, got", "got shape ()",
    ),
    "ids class": (lambda: title(int), TypeError, "feature 'title': ids must be Bags, an integer array or", "got type"),
    "pair weights bool": (
        lambda: title((np.array([1,2]), np.array([True, False]))),
        TypeError, "feature 'title': from_dense: weights must be numbers, got", "got bool",
    ),
    "bags fields None": (
        lambda: title(Bags(None, None)), TypeError, "feature 'title': ids of Bags must be an array, got None",
    ),
    "bags offsets text": (
        lambda: title(Bags(IDS, "03")), TypeError, "feature 'title': offsets of Bags must be an array, got '03'",
    ),
    "bags offsets scalar": (
        lambda: title(Bags(IDS, 3)), TypeError, "feature 'title': offsets of Bags must be an array, got 3",
    ),
    "bags weights text": (
        lambda: title(Bags(IDS, OFFSETS, "abc")),
        TypeError, "feature 'title': weights of Bags must be an array of", "got 'abc' (str)",
    ),
    "bags nested": (lambda: title([B, B]), TypeError, "feature 'title': row 0 must be a flat list of ids, got"),
    "from_lists None": (
        lambda: Bags.from_lists(None),
        TypeError, "rows, one list of ids for each bag, must be a list, got", "got None (NoneType)",
    ),
    "from_lists bool": (
        lambda: Bags.from_lists([[True]]), TypeError, "row 0 holds bool values; ids must be integers, so hash",
    ),
    "from_lists weights None row": (
        lambda: Bags.from_lists([[1], [2]], [[1.0], None]), TypeError, "row 1: weights must be numbers, got object.",
    ),
    "from_lists weights scalar": (
        lambda: Bags.from_lists([[1]], 1.0),
        TypeError, "weights, one list for each bag, must be a list, got 1.0", "got 1.0 (float)",
    ),
    "from_dense weights text": (
        lambda: Bags.from_dense(np.ones((2,2), int), "x"),
        ValueError, "weights have shape (), ids (2, 2); they must be equal.",
    ),
    "from_lengths None": (
        lambda: Bags.from_lengths(None, [1]), ValueError, "ids of all bags must have one axis, got shape ().",
    ),
    "from_lengths text": (
        lambda: Bags.from_lengths(IDS, ["1", "2"]),
        TypeError, "lengths must be an array of integers [bags], got ['1', '2']", "got ['1', '2'] (list)",
    ),
    "from_coo sample float": (
        lambda: Bags.from_coo([0.5, 0, 1], IDS, num_samples=2),
        TypeError, "sample ids must be an array of integers [nnz], got [0.5, 0,", "got [0.5, 0, 1] (list)",
    ),
    "from_coo lengths": (
        lambda: Bags.from_coo([0, 0], IDS, num_samples=2), ValueError, "there are 2 sample ids but 3 embedding ids.",
    ),
    "from_coo num float": (
        lambda: Bags.from_coo([0, 0, 1], IDS, num_samples=2.0),
        TypeError, "num_samples must be an integer, got 2.0 (float).",
    ),
    "pad_to text": (lambda: B.pad_to("8"), TypeError, "num_ids must be an integer, got '8' (str)."),
    "pad_to neg": (lambda: B.pad_to(-1), ValueError, "the bags hold 3 ids and cannot be padded to -1; raise"),
    "mesh text": (
        lambda: on_mesh(title="ab"), TypeError, "feature 'title': ids must be Bags, an integer array or", "got str",
    ),
    "mesh lists inside jit": (
        lambda: jax.jit(lambda x: on_mesh(title=[[x],[x]])["title"])(1),
        TypeError, "feature 'title': inside jit ids are one array, not lists of",
    ),
    "traced in lists": (
        lambda: jax.jit(lambda x: title([[x],[x]])["title"])(1),
        TypeError, "feature 'title': inside jit ids are one array, not lists of",
    ),
    "traced batch other size": (
        lambda: jax.jit(lambda x: dct(x)["title"])(jnp.ones((7,1), int)),
        ValueError, "feature 'title': the batch has 7 samples, but the spec",
    ),
    "keys None": (
        lambda: who(None), TypeError, "feature 'who': ids must be Bags, an integer array or lists,", "got NoneType",
    ),
    "keys list neg": (lambda: who([[-3]]), ValueError, "feature 'who': key -3 at position 0 is negative (1 such"),
}  # fmt: skip
