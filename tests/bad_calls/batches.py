"""Bad bags, and bad batches of `prepare`, which every lookup and step calls."""

import numpy as np

import rsembed as rs
from tests.bad_calls.world import batch, collection, feature, keyed, mesh, table
from tests.world import NA, Column  # noqa: F401, used by calls of the table

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)
# Forms of one batch of bags.
ROWS = [[3, 1], [], [4], [2, 2, 0]]
FLAT, LENGTHS, SAMPLES = [3, 1, 4, 2, 2, 0], [2, 0, 1, 3], [0, 0, 2, 3, 3, 3]
DENSE = np.array([[3, 1, -1], [-1, -1, -1], [4, -1, -1], [2, 2, 0]])
OBJECTS = np.asarray(ROWS, dtype=object)
TEXTS = ["apple", "pear", "", "größe", "apple", "e\u0301", "a\0"]


def objects(values):
    """An array of objects, as NumPy stores texts of any length and missing values."""
    return np.array(values, object)


def who(keys, **storage):
    return keyed(**storage).prepare({"who": keys})


def on_mesh(**changes):
    return rs.EmbeddingCollection([feature(), feature("author")], mesh=mesh()).prepare(
        batch(**changes)
    )


def of_a_larger_table():
    """A batch that a collection with a larger table prepared."""
    specs = [feature(table_spec=table(vocabulary_size=100)), feature("author", table("user"))]
    return rs.EmbeddingCollection(specs).prepare({"title": [[3], [50]], "author": [[1], []]})


def beside_lists(ids):
    """Prepares a batch in which `author` is a list of lists, and `title` is `ids`."""
    return collection().prepare({"author": [[1], [2, 3]], "title": ids})


def beside_bags(ids):
    return collection().prepare({"author": Bags.from_lists([[1], [2, 3]]), "title": ids})


BAD = """
rs.Jagged([1, 2], [1, 1], features=[]) => ValueError: Jagged: features must be names of features, each once, got []
rs.Jagged([1, 2], [1, 1], features=["a", "a"]) => ValueError: Jagged: features ... each once, got ['a', 'a']
rs.Jagged([1, 2, 3], [1, 1, 1], features=["a", "b"]) => ValueError: Jagged: there are 3 lengths ... 2 features
rs.Jagged([1, 2], [1, 2], features=["a"]) => ValueError: lengths add up to 3 ... 2 ids
rs.Jagged([1, 2], [2, 0], features=["a", "b"])["c"] => KeyError: Jagged has no feature 'c' ... 'a', 'b'
# Bags
Bags.from_lists("ab") => TypeError: rows, one list of ids for each bag ... 'ab'
Bags.from_lists([[1], [1.5]]) => TypeError: row 1 ... float64 ... integers
Bags.from_lists([[[1]]]) => TypeError: row 0 ... nested too deeply
title(np.array(["a", "b"])) => TypeError: feature 'title': ids must be integers, got <U1; rs.hash_keys
title(np.array(["a", "b"], object)) => TypeError: feature 'title': row 0 holds texts ('a') ... rs.hash_keys
Bags.from_lists([[2**64 - 1], [-1]]) => TypeError: no integers of 64 bits hold both -1 and
Bags.from_lists([[2**70]]) => TypeError: row 0 ... 64 bits ... 1180591620717411303424
Bags.from_lists([[1], [2]], [[1.0]]) => ValueError: 1 rows, ids 2
Bags.from_lists([[1, 2]], [[1.0]]) => ValueError: row 0 ... 2 ids ... 1 weights
Bags.from_lists([[1]], [["a"]]) => TypeError: row 0: weights ... numbers
title(np.ma.masked_equal([[1, 2], [3, 1]], 1)) => TypeError: feature 'title' ... masked array ... filled(-1)
title([np.ma.masked_equal([1, 2], 1), [3]]) => TypeError: feature 'title' ... masked array
title(Bags(np.ma.masked_equal(IDS, 1), OFFSETS)) => TypeError: masked array
Bags.from_lengths(np.ma.masked_equal(IDS, 1), [3]) => TypeError: masked array
Bags.from_coo([0, 0, 1], np.ma.masked_equal(IDS, 1), num_samples=2) => TypeError: masked array
Bags.from_lengths(IDS, [4, -1]) => ValueError: lengths ... -1 at bag 1
Bags.from_lengths(IDS, [1, 1]) => ValueError: add up to 2 ... 3 ids
Bags.from_lengths(IDS, [1.5, 1.5]) => TypeError: lengths ... integers ... [1.5, 1.5]
Bags.from_lengths(IDS, [[1, 2]]) => ValueError: lengths ... [bags] ... [[1, 2]]
Bags.from_lengths([[1, 2]], [1, 1]) => ValueError: ids ... one axis ... (1, 2)
Bags.from_dense(np.zeros((1, 1, 1), int)) => ValueError: one or two axes ... (1, 1, 1)
Bags.from_dense([1, 2]) => TypeError: dense ids ... array ... from_lists
Bags.from_dense(np.zeros((2, 2), int), np.ones((2, 1))) => ValueError: weights ... (2, 1) ... (2, 2)
Bags.from_coo([0, 5], [1, 2], num_samples=3) => ValueError: sample id 5 ... [0, 3) ... num_samples
Bags.from_coo([0], [1, 2], num_samples=3) => ValueError: 1 sample ids ... 2 embedding
Bags.from_coo([0.0, 1.5], [1, 2], num_samples=3) => TypeError: sample ids ... integers ... [0.0, 1.5]
Bags.from_coo([0, 1], [1, 2], [1.0], num_samples=3) => ValueError: 1 gains ... 2 ids
Bags.from_coo([0], [1], num_samples="3") => TypeError: num_samples ... integer ... '3'
Bags.from_coo([], [], num_samples=-3) => ValueError: num_samples ... -3
Bags.from_sparse_tensor(np.zeros((2, 3), int), [1, 2, 3], (2, 2)) => ValueError: indices ... [nnz, 2] ... (2, 3)
Bags.from_sparse_tensor([[0, 0]], [1], 2) => TypeError: dense_shape (samples, positions) ... 2
Bags(IDS, OFFSETS).pad_to(2) => ValueError: 3 ids ... padded to 2 ... num_ids
Bags(IDS, OFFSETS).pad_to(4.5) => TypeError: num_ids ... integer ... 4.5
# Missing ids
title(Column([1, None, 3]))
    => TypeError: feature 'title': row 1 has a missing value (None); fill missing values with -1, which is no id
title(Column([1, NAN, 3]))
    => TypeError: feature 'title': row 1 has a missing value (nan); fill missing values with -1, which is no id
title(Column([1, NA(), 3]))
    => TypeError: feature 'title': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
who(Column([1, None, 3]))
    => TypeError: feature 'who': row 1 has a missing value (None); fill missing values with -1, which is no id
who(Column([1, NAN, 3]))
    => TypeError: feature 'who': row 1 has a missing value (nan); fill missing values with -1, which is no id
who(Column([1, NA(), 3]))
    => TypeError: feature 'who': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
title([1, 2, None])
    => TypeError: feature 'title': row 2 has a missing value (None); fill missing values with -1, which is no id
title([1, 2, NAN])
    => TypeError: feature 'title': row 2 has a missing value (nan); fill missing values with -1, which is no id
title([1, 2, NA()])
    => TypeError: feature 'title': row 2 has a missing value ( ... ); fill missing values with -1, which is no id
who([1, 2, None])
    => TypeError: feature 'who': row 2 has a missing value (None); fill missing values with -1, which is no id
who([1, 2, NAN])
    => TypeError: feature 'who': row 2 has a missing value (nan); fill missing values with -1, which is no id
who([1, 2, NA()])
    => TypeError: feature 'who': row 2 has a missing value ( ... ); fill missing values with -1, which is no id
title(Column([[1], [2, None]]))
    => TypeError: feature 'title': row 1 has a missing value (None); fill missing values with -1, which is no id
title(Column([[1], [2, NAN]]))
    => TypeError: feature 'title': row 1 has a missing value (nan); fill missing values with -1, which is no id
title(Column([[1], [2, NA()]]))
    => TypeError: feature 'title': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
who(Column([[1], [2, None]]))
    => TypeError: feature 'who': row 1 has a missing value (None); fill missing values with -1, which is no id
who(Column([[1], [2, NAN]]))
    => TypeError: feature 'who': row 1 has a missing value (nan); fill missing values with -1, which is no id
who(Column([[1], [2, NA()]]))
    => TypeError: feature 'who': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
title([[1, None], [2]])
    => TypeError: feature 'title': row 0 has a missing value (None); fill missing values with -1, which is no id
title([[1, NAN], [2]])
    => TypeError: feature 'title': row 0 has a missing value (nan); fill missing values with -1, which is no id
title([[1, NA()], [2]])
    => TypeError: feature 'title': row 0 has a missing value ( ... ); fill missing values with -1, which is no id
who([[1, None], [2]])
    => TypeError: feature 'who': row 0 has a missing value (None); fill missing values with -1, which is no id
who([[1, NAN], [2]])
    => TypeError: feature 'who': row 0 has a missing value (nan); fill missing values with -1, which is no id
who([[1, NA()], [2]])
    => TypeError: feature 'who': row 0 has a missing value ( ... ); fill missing values with -1, which is no id
title(Column([[1], None, [2]]))
    => TypeError: feature 'title': row 1 has a missing value (None); fill missing values with -1, which is no id
title(Column([[1], NAN, [2]]))
    => TypeError: feature 'title': row 1 has a missing value (nan); fill missing values with -1, which is no id
title(Column([[1], NA(), [2]]))
    => TypeError: feature 'title': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
who(Column([[1], None, [2]]))
    => TypeError: feature 'who': row 1 has a missing value (None); fill missing values with -1, which is no id
who(Column([[1], NAN, [2]]))
    => TypeError: feature 'who': row 1 has a missing value (nan); fill missing values with -1, which is no id
who(Column([[1], NA(), [2]]))
    => TypeError: feature 'who': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
title([[1], [2], None])
    => TypeError: feature 'title': row 2 has a missing value (None); fill missing values with -1, which is no id
title([[1], [2], NAN])
    => TypeError: feature 'title': row 2 has a missing value (nan); fill missing values with -1, which is no id
title([[1], [2], NA()])
    => TypeError: feature 'title': row 2 has a missing value ( ... ); fill missing values with -1, which is no id
who([[1], [2], None])
    => TypeError: feature 'who': row 2 has a missing value (None); fill missing values with -1, which is no id
who([[1], [2], NAN])
    => TypeError: feature 'who': row 2 has a missing value (nan); fill missing values with -1, which is no id
who([[1], [2], NA()])
    => TypeError: feature 'who': row 2 has a missing value ( ... ); fill missing values with -1, which is no id
title(np.array([[1, 2], [3, None]], object))
    => TypeError: feature 'title': row 1 has a missing value (None); fill missing values with -1, which is no id
title(np.array([[1, 2], [3, NAN]], object))
    => TypeError: feature 'title': row 1 has a missing value (nan); fill missing values with -1, which is no id
title(np.array([[1, 2], [3, NA()]], object))
    => TypeError: feature 'title': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
who(np.array([[1, 2], [3, None]], object))
    => TypeError: feature 'who': row 1 has a missing value (None); fill missing values with -1, which is no id
who(np.array([[1, 2], [3, NAN]], object))
    => TypeError: feature 'who': row 1 has a missing value (nan); fill missing values with -1, which is no id
who(np.array([[1, 2], [3, NA()]], object))
    => TypeError: feature 'who': row 1 has a missing value ( ... ); fill missing values with -1, which is no id
title(np.array([1, 2, None], object))
    => TypeError: feature 'title': row 2 has a missing value (None); fill missing values with -1, which is no id
title(np.array([1, 2, NAN], object))
    => TypeError: feature 'title': row 2 has a missing value (nan); fill missing values with -1, which is no id
title(np.array([1, 2, NA()], object))
    => TypeError: feature 'title': row 2 has a missing value ( ... ); fill missing values with -1, which is no id
who(np.array([1, 2, None], object))
    => TypeError: feature 'who': row 2 has a missing value (None); fill missing values with -1, which is no id
who(np.array([1, 2, NAN], object))
    => TypeError: feature 'who': row 2 has a missing value (nan); fill missing values with -1, which is no id
who(np.array([1, 2, NA()], object))
    => TypeError: feature 'who': row 2 has a missing value ( ... ); fill missing values with -1, which is no id
title(np.array([1.0, 2.0, NAN]))
    => TypeError: feature 'title': row 2 has a missing value (nan); fill missing values with -1, which is no id
title(Bags(np.array([1.0, 2.0, NAN]), OFFSETS))
    => TypeError: feature 'title': row 1 has a missing value (nan); fill missing values with -1, which is no id
who(Bags(np.array([1.0, 2.0, NAN]), OFFSETS))
    => TypeError: feature 'who': row 1 has a missing value (nan); fill missing values with -1, which is no id
# Keys
rs.keys.join_keys([0], [1 << 31], dtype=np.int32) => ValueError: key 2147483648 does not fit into int32; ask for uint64
rs.keys.owners(rs.keys.split_keys(IDS), 0) => ValueError: num_shards must lie in [1, 65536], got 0
rs.keys.owners(rs.keys.split_keys(IDS), 65537) => ValueError: num_shards must lie in [1, 65536], got 65537
rs.keys.local_rows(rs.keys.split_keys(IDS), 0, 1) => ValueError: num_shards must lie in [1, 65536], got 0
rs.keys.local_rows(rs.keys.split_keys(IDS), 65537, 1) => ValueError: num_shards must lie in [1, 65536], got 65537
# Keys of texts
rs.hash_keys("apple") => TypeError: hash_keys: column must be a column or list of texts, got 'apple'
rs.hash_keys(5) => TypeError: hash_keys: column must be a column or list of texts, got 5
rs.hash_keys(IDS) => TypeError: hash_keys: integers are keys already; pass them as they are.
rs.hash_keys(["a", 5]) => TypeError: hash_keys: row 1 has 5 (int), neither text nor bytes; integers are keys already.
rs.hash_keys(["a", 1.5]) => TypeError: hash_keys: row 1 has 1.5 (float) ... convert it
rs.hash_keys(["a", None]) => ValueError: hash_keys: row 1 has a missing value (None); give missing=-1
rs.hash_keys(np.array([["a", "b"], ["c", None]], object)) => ValueError: hash_keys: row 1 has a missing value
rs.hash_keys([["a"], ["b", None]]) => ValueError: hash_keys: row 1 has a missing value (None)
rs.hash_keys([["a"], [["b"]]]) => TypeError: hash_keys: ... nested too deeply ... flatten it
rs.hash_keys(["a", "b", None, "c", None]) => ValueError: row 2 has a missing value (None); give missing=-1
rs.hash_keys(["a", "b", NAN, "c", NAN]) => ValueError: row 2 has a missing value (nan); give missing=-1
rs.hash_keys(["a", "b", np.datetime64("NaT", "ns"), "c", np.datetime64("NaT", "ns")])
    => ValueError: row 2 has a missing value ( ... ); give missing=-1
rs.hash_keys(["a", "b", NA(), "c", NA()]) => ValueError: row 2 has a missing value ( ... ); give missing=-1
rs.hash_keys(Column(["a", "b", None, "c", None])) => ValueError: row 2 has a missing value (None); give missing=-1
rs.hash_keys(Column(["a", "b", NAN, "c", NAN])) => ValueError: row 2 has a missing value (nan); give missing=-1
rs.hash_keys(Column(["a", "b", np.datetime64("NaT", "ns"), "c", np.datetime64("NaT", "ns")]))
    => ValueError: row 2 has a missing value ( ... ); give missing=-1
rs.hash_keys(Column(["a", "b", NA(), "c", NA()])) => ValueError: row 2 has a missing value ( ... ); give missing=-1
rs.hash_keys(objects(["a", "b", None, "c", None])) => ValueError: row 2 has a missing value (None); give missing=-1
rs.hash_keys(objects(["a", "b", NAN, "c", NAN])) => ValueError: row 2 has a missing value (nan); give missing=-1
rs.hash_keys(objects(["a", "b", np.datetime64("NaT", "ns"), "c", np.datetime64("NaT", "ns")]))
    => ValueError: row 2 has a missing value ( ... ); give missing=-1
rs.hash_keys(objects(["a", "b", NA(), "c", NA()]))
    => ValueError: row 2 has a missing value ( ... ); give missing=-1
rs.hash_keys(["a", "\\udc80"]) => ValueError: hash_keys: row 1 has '\\udc80', which is not Unicode
rs.hash_keys(["a"], missing=2**63) => ValueError: hash_keys: missing=9223372036854775808 does not fit 64 bits
rs.hash_keys(["a"], missing="none") => TypeError: hash_keys: missing must be an integer ... 'none'
# Forms of a batch
collection().prepare([[1], [2]]) => TypeError: batch ... 'title' ... mapping ... list
collection().prepare({"title": IDS}) => ValueError: missing ['author'], unknown []
collection().prepare(batch(date=IDS)) => ValueError: missing [], unknown ['date']
collection().prepare(batch(title=who(np.array([2**40]))["who"]))
    => TypeError: feature 'title' ... Keys ... rsembed.Hashed
title(None) => TypeError: feature 'title' ... Bags, an integer array or lists ... NoneType
title(i for i in (1, 2)) => TypeError: feature 'title' ... generator
title(np.array([[1.0], [2.0]])) => TypeError: feature 'title' ... integers ... float64
title(jax.random.split(jax.random.key(0), 2)) => TypeError: feature 'title': ids must be integers, got key<fry>
title([["a"], ["b"]]) => TypeError: feature 'title': row 0 holds texts ('a') ... integers; rs.hash_keys
title(np.zeros((2, 1, 1), int)) => ValueError: feature 'title' ... two axes ... (2, 1, 1)
title([[1], [2**70]]) => TypeError: feature 'title': row 1 ... 64 bits
title(np.array([1, 2**70], object)) => TypeError: feature 'title': ids must fit 64 bits, got 1180591620717411303424
title(np.array([-1, 2**64 - 1], object)) => TypeError: no integers of 64 bits hold both -1 and 18446744073709551615
# Ids outside their table
title([[1], [9]]) => ValueError: feature 'title': id 9 in sample 1 ... table 'word' ... vocabulary_size=9 ... hash
title([[1], [-2]]) => ValueError: feature 'title': id -2 in sample 1 ... table 'word' ... -1
collection().prepare(of_a_larger_table())
    => ValueError: feature 'title': id 50 in sample 1 is outside table 'word' with vocabulary_size=9
# Bags in a batch
title(Bags(IDS, np.array([0.0, 3.0]))) => TypeError: feature 'title': offsets ... float64
title(Bags(IDS, np.array([1, 3]))) => ValueError: feature 'title': offsets must start at 0 ... [1, 3]
title(Bags(IDS, np.array([0, 4]))) => ValueError: feature 'title' ... offset is 4 ... 3 ids
title(Bags(IDS, np.array([0, 2]))) => ValueError: feature 'title' ... offset is 2 ... 1 would be
# In one of many ragged features
beside_lists([[1], [2, 70]]) => ValueError: feature 'title': id 70 in sample 1 is outside table 'word'
beside_lists([[1], [2, -2]]) => ValueError: feature 'title': id -2 in sample 1
beside_lists([[1], [2, 2**70]]) => TypeError: feature 'title': row 1 holds ids that do not fit 64 bits
beside_bags(Bags(np.arange(4), np.array([0, 3, 2]))) => ValueError: 'title': offsets must start at 0 and never fall
beside_bags(Bags(np.arange(4), np.array([1, 2, 4]))) => ValueError: feature 'title': offsets must start at 0
beside_bags(Bags(np.arange(4), np.array([0, 2, 9]))) => ValueError: feature 'title': the last offset is 9
# Weights
title(([[1], [2]], [[1.0], [float("nan")]])) => ValueError: feature 'title': weight nan in sample 1 ... finite
title((IDS, np.ones(2, np.float32))) => ValueError: feature 'title': weights have shape (2,) ... (3,)
title(([1, 2], ["a", "b"])) => TypeError: feature 'title' ... weights ... numbers
title((IDS, np.array([1j, 1, 1]))) => TypeError: feature 'title' ... weights ... complex
title(Bags(IDS, OFFSETS, np.ones(2, np.float32))) => ValueError: feature 'title': 2 weights ... 3 ids
title((IDS, IDS, IDS, 1.5)) => TypeError: feature 'title': row 3 ... float64
# Sizes
rs.EmbeddingCollection([feature(input_shape=(8, 1))]).prepare({"title": np.zeros((7, 1), int)})
    => ValueError: feature 'title' ... 7 samples ... declares 8
on_mesh(title=np.array([1, 2, 3])) => ValueError: feature 'title' ... 3 samples ... 2 devices
jax.jit(who)(np.array([2**40 + 7])) => TypeError: feature 'who' ... int32 ... key_dtype='int64' ... collection.prepare
jax.jit(lambda bags: on_mesh(title=bags)["title"])(Bags(IDS, OFFSETS))
    => ValueError: feature 'title' ... collection.prepare(batch)
# Keys
who(np.array([True])) => TypeError: feature 'who': ids must be integers, got bool
who(np.array([1.5])) => TypeError: feature 'who': ids must be integers ... float64
who(np.array([2**31]), key_dtype="int32") => ValueError: feature 'who': key 2147483648 ... key_dtype='int32'
collection().lookup(state(), None) => TypeError: batch, with one entry for each of ['author', 'title'], must
title(Bags(None, None)) => TypeError: feature 'title': ids of Bags must be an array, got None
title(Bags(IDS, "03")) => TypeError: feature 'title': offsets of Bags must be an array, got '03'
title(Bags(IDS, OFFSETS, "abc")) => TypeError: feature 'title': weights of Bags must be an array of ... got 'abc' (str)
title([Bags.from_lists([[1, 2], [3]])] * 2) => TypeError: feature 'title': row 0 must be a flat list of ids, got
Bags.from_lists([[True]]) => TypeError: row 0 holds bool values, but ids must be integers
Bags.from_lists([[1]], 1.0) => TypeError: weights, one list for each bag, must be a list, got 1.0 (float)
Bags.from_dense(np.ones((2,2), int), "x") => ValueError: weights have shape (), ids (2, 2); they must be equal.
jax.jit(lambda x: on_mesh(title=[[x],[x]])["title"])(1)
    => TypeError: feature 'title': inside jit ids are one array, not lists of
who(None) => TypeError: feature 'who': ids must be Bags, an integer array or lists, got NoneType
"""

ACCEPTED = """
rs.hash_keys(["a", "b", None, "c", None], missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(["a", "b", NAN, "c", NAN], missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(["a", "b", np.datetime64("NaT", "ns"), "c", np.datetime64("NaT", "ns")], missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(["a", "b", NA(), "c", NA()], missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
[*map(list, rs.hash_keys([["a"], ["b", None], None], missing=7))]
    => [list(rs.hash_keys(["a"])), [*rs.hash_keys(["b"]), np.int64(7)], [np.int64(7)]]
[*map(list, rs.hash_keys([["a"], ["b", NA()], NA()], missing=7))]
    => [list(rs.hash_keys(["a"])), [*rs.hash_keys(["b"]), np.int64(7)], [np.int64(7)]]
rs.hash_keys(Column(["a", "b", None, "c", None]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(Column(["a", "b", NAN, "c", NAN]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(Column(["a", "b", np.datetime64("NaT", "ns"), "c", np.datetime64("NaT", "ns")]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(Column(["a", "b", NA(), "c", NA()]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
[*map(list, rs.hash_keys(Column([["a"], ["b", None], None]), missing=7))]
    => [list(rs.hash_keys(["a"])), [*rs.hash_keys(["b"]), np.int64(7)], [np.int64(7)]]
[*map(list, rs.hash_keys(Column([["a"], ["b", NA()], NA()]), missing=7))]
    => [list(rs.hash_keys(["a"])), [*rs.hash_keys(["b"]), np.int64(7)], [np.int64(7)]]
rs.hash_keys(objects(["a", "b", None, "c", None]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(objects(["a", "b", NAN, "c", NAN]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(objects(["a", "b", np.datetime64("NaT", "ns"), "c", np.datetime64("NaT", "ns")]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
rs.hash_keys(objects(["a", "b", NA(), "c", NA()]), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1, *rs.hash_keys(["c"]), -1])
[*map(list, rs.hash_keys(objects([["a"], ["b", None], None]), missing=7))]
    => [list(rs.hash_keys(["a"])), [*rs.hash_keys(["b"]), np.int64(7)], [np.int64(7)]]
[*map(list, rs.hash_keys(objects([["a"], ["b", NA()], NA()]), missing=7))]
    => [list(rs.hash_keys(["a"])), [*rs.hash_keys(["b"]), np.int64(7)], [np.int64(7)]]
rs.hash_keys(np.ma.array(["a", "b", "x"], mask=[False, False, True], dtype=object), missing=-1)
    => np.array([*rs.hash_keys(["a", "b"]), -1])
rs.hash_keys(tuple(TEXTS)) => rs.hash_keys(TEXTS)
rs.hash_keys(iter(TEXTS)) => rs.hash_keys(TEXTS)
rs.hash_keys(Column(TEXTS)) => rs.hash_keys(TEXTS)
rs.hash_keys(objects(TEXTS)) => rs.hash_keys(TEXTS)
rs.hash_keys(np.array(TEXTS[:-1])) => rs.hash_keys(TEXTS[:-1])
rs.hash_keys(np.array(TEXTS, np.dtypes.StringDType())) => rs.hash_keys(TEXTS)
rs.hash_keys(np.ma.array(TEXTS, mask=False, dtype=object)) => rs.hash_keys(TEXTS)
rs.hash_keys([text.encode() for text in TEXTS]) => rs.hash_keys(TEXTS)
rs.hash_keys(np.array([["a", "b"], ["b", "c"]])) => rs.hash_keys(["a", "b", "b", "c"]).reshape(2, 2)
rs.hash_keys([]).shape => (0,)
rs.hash_keys(objects([])).shape => (0,)
[row.tolist() for row in rs.hash_keys([["a"], [], ["b", "a"]])]
    => [rs.hash_keys(["a"]).tolist(), [], rs.hash_keys(["b", "a"]).tolist()]
[row.tolist() for row in rs.hash_keys(Column([objects(["a"]), [], np.array(["b", "a"])]))]
    => [rs.hash_keys(["a"]).tolist(), [], rs.hash_keys(["b", "a"]).tolist()]
[str(row.dtype) for row in rs.hash_keys([["a"], []])] => ["int64", "int64"]
Bags.from_lists(ROWS).to_lists() => ROWS
Bags.from_lists([np.asarray(row, np.int64) for row in ROWS]).to_lists() => ROWS
Bags.from_lengths(FLAT, LENGTHS).to_lists() => ROWS
Bags.from_lengths(Column(np.array(FLAT)), Column(np.array(LENGTHS))).to_lists() => ROWS
Bags.from_coo(SAMPLES, FLAT, num_samples=4).to_lists() => ROWS
Bags.from_coo(Column(np.array(SAMPLES)), Column(np.array(FLAT)), num_samples=4).to_lists() => ROWS
Bags.from_coo([3, 2, 0, 3, 0, 3], [2, 4, 3, 2, 1, 0], num_samples=4).to_lists() => ROWS
Bags.from_sparse_tensor([[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]], FLAT, (4, 3)).to_lists() => ROWS
Bags.from_dense(DENSE).to_lists() => ROWS
jax.jit(Bags.from_dense)(jnp.asarray(DENSE)).to_lists() => ROWS
rs.bags.as_bags(ROWS, feature="f").to_lists() => ROWS
rs.bags.as_bags(OBJECTS, feature="f").to_lists() => ROWS
rs.bags.as_bags(Column(ROWS), feature="f").to_lists() => ROWS
rs.bags.as_bags(DENSE, feature="f").to_lists() => ROWS
rs.bags.as_bags(Column(DENSE), feature="f").to_lists() => ROWS
rs.bags.as_bags([3, 1], feature="f").to_lists() => [[3], [1]]
rs.bags.as_bags(np.array([3, 1], object), feature="f").to_lists() => [[3], [1]]
rs.bags.as_bags([np.array([3, 1], object), np.array([np.int64(4)], object)], feature="f").to_lists() => [[3, 1], [4]]
rs.bags.as_bags(np.array([2**64 - 1, 5], object), feature="f").to_lists() => [[2**64 - 1], [5]]
title(np.array([1, 2], np.int8)) => title(np.array([1, 2]))
title(np.array([1, 2], np.uint64)) => title(np.array([1, 2]))
title([1, 2]) => title(np.array([1, 2]))
title(((1, 2), (3,), ())) => title([[1, 2], [3], []])
title([1, [2, 3]]) => title([[1], [2, 3]])
title([[np.int8(1)], [np.int64(2)]]) => title([[1], [2]])
title((IDS, np.ones(3))) => title((IDS, np.ones(3, np.float32)))
collection().prepare(collection().prepare(batch())) => collection().prepare(batch())
collection().prepare(dict(reversed(batch().items()))) => collection().prepare(batch())
collection().lookup(state(), batch(title=[[], []]))["title"] => jnp.zeros((2, 4))
other().prepare({"title": []})["title"].num_bags => 0
title(np.array([-1, -1])) => title(np.full((2,), -1, np.int8))
title([1, 2, 3]) => title(np.array([1, 2, 3]))
"""
