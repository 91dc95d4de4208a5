"""Bad bags and batches: what `prepare`, and so every lookup and step, is given."""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed.keys import split_keys
from tests.bad_calls.world import batch, collection, feature, keyed, mesh, other, state, title

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)


def declared(ids, **shape):
    """A feature that declares eight samples of one id."""
    spec = feature(**({"input_shape": (8, 1)} | shape))
    return rs.EmbeddingCollection([spec]).prepare({"title": ids})


def who(keys, **storage):
    return keyed(**storage).prepare({"who": keys})


def on_mesh(**changes):
    return rs.EmbeddingCollection([feature(), feature("author")], mesh=mesh()).prepare(batch(**changes))


BAD = {
    # Bags
    "a text for rows": (lambda: Bags.from_lists("ab"), TypeError, "rows", "one list of ids for each bag", "'ab'"),
    "rows of floats": (lambda: Bags.from_lists([[1], [1.5]]), TypeError, "row 1", "float64", "integers"),
    "rows nested too deeply": (lambda: Bags.from_lists([[[1]]]), TypeError, "row 0", "nested too deeply"),
    "an id that is missing": (lambda: title([[1, None]]), TypeError, "row 0", "[1, None]", "a missing value is -1"),
    "ids beyond 64 bits": (lambda: Bags.from_lists([[2**70]]), TypeError, "row 0", str(2**70), "64 bits"),
    "weights of other rows": (lambda: Bags.from_lists([[1], [2]], [[1.0]]), ValueError, "1 rows", "ids 2"),
    "too few weights": (lambda: Bags.from_lists([[1, 2]], [[1.0]]), ValueError, "row 0", "2 ids", "1 weights"),
    "weights as texts": (lambda: Bags.from_lists([[1]], [["a"]]), TypeError, "row 0", "weights", "numbers"),
    "masked dense ids": (
        lambda: title(np.ma.masked_equal([[1, 2], [3, 1]], 1)), TypeError, "feature 'title'", "masked array",
        "filled(-1)",
    ),
    "masked rows": (lambda: title([np.ma.masked_equal([1, 2], 1), [3]]), TypeError, "feature 'title'", "masked array"),
    "masked ids of bags": (lambda: title(Bags(np.ma.masked_equal(IDS, 1), OFFSETS)), TypeError, "masked array"),
    "masked ids with lengths": (lambda: Bags.from_lengths(np.ma.masked_equal(IDS, 1), [3]), TypeError, "masked array"),
    "masked coordinates": (
        lambda: Bags.from_coo([0, 0, 1], np.ma.masked_equal(IDS, 1), num_samples=2), TypeError, "masked array",
    ),
    "negative lengths": (lambda: Bags.from_lengths(IDS, [4, -1]), ValueError, "lengths", "-1 at bag 1"),
    "lengths that do not add up": (lambda: Bags.from_lengths(IDS, [1, 1]), ValueError, "add up to 2", "3 ids"),
    "lengths as floats": (lambda: Bags.from_lengths(IDS, [1.5, 1.5]), TypeError, "lengths", "integers", "[1.5, 1.5]"),
    "lengths of two axes": (lambda: Bags.from_lengths(IDS, [[1, 2]]), ValueError, "lengths", "[bags]", "[[1, 2]]"),
    "values of two axes": (lambda: Bags.from_lengths([[1, 2]], [1, 1]), ValueError, "ids", "one axis", "(1, 2)"),
    "dense ids of three axes": (
        lambda: Bags.from_dense(np.zeros((1, 1, 1), int)), ValueError, "one or two axes", "(1, 1, 1)",
    ),
    "a list as dense ids": (lambda: Bags.from_dense([1, 2]), TypeError, "dense ids", "array", "from_lists", "list"),
    "dense weights of another shape": (
        lambda: Bags.from_dense(np.zeros((2, 2), int), np.ones((2, 1))), ValueError, "weights", "(2, 1)", "(2, 2)",
    ),
    "sample ids outside": (
        lambda: Bags.from_coo([0, 5], [1, 2], num_samples=3), ValueError, "sample id 5", "[0, 3)", "num_samples",
    ),
    "fewer sample ids than ids": (
        lambda: Bags.from_coo([0], [1, 2], num_samples=3), ValueError, "1 sample ids", "2 embedding",
    ),
    "sample ids as floats": (
        lambda: Bags.from_coo([0.0, 1.5], [1, 2], num_samples=3), TypeError, "sample ids", "integers", "[0.0, 1.5]",
    ),
    "too few gains": (lambda: Bags.from_coo([0, 1], [1, 2], [1.0], num_samples=3), ValueError, "1 gains", "2 ids"),
    "a number of samples as text": (
        lambda: Bags.from_coo([0], [1], num_samples="3"), TypeError, "num_samples", "integer", "'3'",
    ),
    "a negative number of samples": (lambda: Bags.from_coo([], [], num_samples=-3), ValueError, "num_samples", "-3"),
    "sparse indices of three columns": (
        lambda: Bags.from_sparse_tensor(np.zeros((2, 3), int), [1, 2, 3], (2, 2)), ValueError, "indices", "[nnz, 2]",
        "(2, 3)",
    ),
    "a sparse tensor without a shape": (
        lambda: Bags.from_sparse_tensor([[0, 0]], [1], 2), TypeError, "dense_shape", "(samples, positions)", "2",
    ),
    "room for too few ids": (lambda: Bags(IDS, OFFSETS).pad_to(2), ValueError, "3 ids", "padded to 2", "num_ids"),
    "room for half an id": (lambda: Bags(IDS, OFFSETS).pad_to(4.5), TypeError, "num_ids", "integer", "4.5"),
    # Forms of a batch
    "a list in place of a batch": (
        lambda: collection().prepare([[1], [2]]), TypeError, "batch", "mapping", "'title'", "list",
    ),
    "a missing feature": (lambda: collection().prepare({"title": IDS}), ValueError, "missing ['author']", "unknown []"),
    "a feature too many": (lambda: collection().prepare(batch(date=IDS)), ValueError, "missing []", "unknown ['date']"),
    "a prepared batch of keys": (
        lambda: collection().prepare(batch(title=who(np.array([2**40]))["who"])), TypeError, "feature 'title'", "Keys",
        "rsembed.Hashed",
    ),
    "None for a feature": (
        lambda: title(None), TypeError, "feature 'title'", "Bags, an integer array or lists", "NoneType",
    ),
    "a generator for a feature": (lambda: title(i for i in (1, 2)), TypeError, "feature 'title'", "generator"),
    "ids of floats": (lambda: title(np.array([[1.0], [2.0]])), TypeError, "feature 'title'", "integers", "float64"),
    "lists of texts": (lambda: title([["a"], ["b"]]), TypeError, "feature 'title'", "row 0", "integers"),
    "an array of three axes": (
        lambda: title(np.zeros((2, 1, 1), int)), ValueError, "feature 'title'", "(2, 1, 1)", "two axes",
    ),
    "lists of ids beyond 64 bits": (lambda: title([[1], [2**70]]), TypeError, "feature 'title'", "row 1", "64 bits"),
    # Ids outside their table
    "an id too large": (
        lambda: title([[1], [9]]), ValueError, "feature 'title'", "id 9 in sample 1", "table 'word'",
        "vocabulary_size=9", "hash",
    ),
    "a negative id": (
        lambda: title([[1], [-2]]), ValueError, "feature 'title'", "id -2 in sample 1", "table 'word'", "-1",
    ),
    # Bags in a batch
    "offsets of floats": (
        lambda: title(Bags(IDS, np.array([0.0, 3.0]))), TypeError, "feature 'title'", "offsets", "float64",
    ),
    "offsets that do not start at 0": (
        lambda: title(Bags(IDS, np.array([1, 3]))), ValueError, "feature 'title'", "offsets must start at 0", "[1, 3]",
    ),
    "offsets behind the ids": (
        lambda: title(Bags(IDS, np.array([0, 4]))), ValueError, "feature 'title'", "offset is 4", "3 ids",
    ),
    "ids behind the last offset": (
        lambda: title(Bags(IDS, np.array([0, 2]))), ValueError, "feature 'title'", "offset is 2", "1 would be",
    ),
    # Weights
    "weights of NaN": (
        lambda: title(([[1], [2]], [[1.0], [float("nan")]])), ValueError, "feature 'title'", "weight nan in sample 1",
        "finite",
    ),
    "weights of another shape": (
        lambda: title((IDS, np.ones(2, np.float32))), ValueError, "feature 'title'", "weights have shape (2,)", "(3,)",
    ),
    "weights of texts": (lambda: title(([1, 2], ["a", "b"])), TypeError, "feature 'title'", "weights", "numbers"),
    "complex weights": (lambda: title((IDS, np.array([1j, 1, 1]))), TypeError, "feature 'title'", "weights", "complex"),
    "bags with too few weights": (
        lambda: title(Bags(IDS, OFFSETS, np.ones(2, np.float32))), ValueError, "feature 'title'", "2 weights", "3 ids",
    ),
    "a triple": (lambda: title((IDS, IDS, IDS, 1.5)), TypeError, "feature 'title'", "row 3", "float64"),
    # Sizes
    "another batch than declared": (
        lambda: declared(np.zeros((7, 1), int)), ValueError, "feature 'title'", "7 samples", "declares 8",
    ),
    "a batch that devices cannot share": (
        lambda: on_mesh(title=np.array([1, 2, 3])), ValueError, "feature 'title'", "3 samples", "2 devices",
    ),
    "bags inside jit on a mesh": (
        lambda: jax.jit(lambda bags: on_mesh(title=bags)["title"])(Bags(IDS, OFFSETS)), ValueError, "feature 'title'",
        "collection.prepare(batch)",
    ),
    # Keys
    "a negative key": (lambda: who(np.array([-2])), ValueError, "feature 'who'", "key -2 at position 0", "uint64"),
    "a key of floats": (lambda: who(np.array([1.5])), TypeError, "feature 'who'", "keys must be integers", "float64"),
    "a key too wide for its table": (
        lambda: who(np.array([2**31]), key_dtype="int32"), ValueError, "feature 'who'", "key 2147483648",
        "key_dtype='int32'",
    ),
    "keys of floats": (lambda: split_keys(np.array([1.5])), TypeError, "keys", "integers", "float64"),
    "negative keys": (lambda: split_keys(np.array([3, -7])), ValueError, "keys", "key -7 at position 1", "uint64"),
    "no batch": (
        lambda: collection().lookup(state(), None),
        TypeError, "batch, with one entry for each of ['author', 'title'], must",
    ),
    "bags of None": (
        lambda: title(Bags(None, None)), TypeError, "feature 'title': ids of Bags must be an array, got None",
    ),
    "offsets as text": (
        lambda: title(Bags(IDS, "03")), TypeError, "feature 'title': offsets of Bags must be an array, got '03'",
    ),
    "weights of bags as text": (
        lambda: title(Bags(IDS, OFFSETS, "abc")),
        TypeError, "feature 'title': weights of Bags must be an array of", "got 'abc' (str)",
    ),
    "bags of bags": (lambda: title([Bags.from_lists([[1, 2], [3]])] * 2),
        TypeError, "feature 'title': row 0 must be a flat list of ids, got"),
    "truth values as ids": (
        lambda: Bags.from_lists([[True]]), TypeError, "row 0 holds bool values; ids must be integers, so hash",
    ),
    "one weight for all rows": (
        lambda: Bags.from_lists([[1]], 1.0),
        TypeError, "weights, one list for each bag, must be a list, got 1.0", "got 1.0 (float)",
    ),
    "dense weights as text": (
        lambda: Bags.from_dense(np.ones((2,2), int), "x"),
        ValueError, "weights have shape (), ids (2, 2); they must be equal.",
    ),
    "lists inside jit": (
        lambda: jax.jit(lambda x: on_mesh(title=[[x],[x]])["title"])(1),
        TypeError, "feature 'title': inside jit ids are one array, not lists of",
    ),
    "no keys": (
        lambda: who(None), TypeError, "feature 'who': ids must be Bags, an integer array or lists,", "got NoneType",
    ),
}  # fmt: skip

ACCEPTED = {
    "ids of int8": (lambda: title(np.array([1, 2], np.int8)), lambda: title(np.array([1, 2]))),
    "ids of uint64": (lambda: title(np.array([1, 2], np.uint64)), lambda: title(np.array([1, 2]))),
    "a list of numbers": (lambda: title([1, 2]), lambda: title(np.array([1, 2]))),
    "a tuple of lists": (lambda: title(((1, 2), (3,), ())), lambda: title([[1, 2], [3], []])),
    "numbers and lists together": (lambda: title([1, [2, 3]]), lambda: title([[1], [2, 3]])),
    "lists of numpy integers": (lambda: title([[np.int8(1)], [np.int64(2)]]), lambda: title([[1], [2]])),
    "weights of float64": (lambda: title((IDS, np.ones(3))), lambda: title((IDS, np.ones(3, np.float32)))),
    "a batch prepared twice": (
        lambda: collection().prepare(collection().prepare(batch())), lambda: collection().prepare(batch()),
    ),
    "features in another order": (
        lambda: collection().prepare(dict(reversed(batch().items()))), lambda: collection().prepare(batch()),
    ),
    "bags that are all empty": (
        lambda: collection().lookup(state(), batch(title=[[], []]))["title"], lambda: jnp.zeros((2, 4)),
    ),
    "no samples": (lambda: other().prepare({"title": []})["title"].num_bags, lambda: 0),
    "padding alone": (lambda: title(np.array([-1, -1])), lambda: title(np.full((2,), -1, np.int8))),
    "batches of other sizes by feature": (
        lambda: title([1, 2, 3]), lambda: {"title": title([1, 2, 3])["title"], "author": title([1])["author"]},
    ),
}  # fmt: skip
