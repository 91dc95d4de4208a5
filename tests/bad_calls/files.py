"""Bad checkpoints, statistics and limits."""

import numpy as np

from rsembed import checkpoint, fdo
from tests.bad_calls.checkpoints import ARRAYS, fresh, manager, saved
from tests.bad_calls.leaves import file
from tests.bad_calls.statistics import client, limits, statistics
from tests.bad_calls.world import NAN, collection, feature, state, table

CK = checkpoint


def st(**c):
    return statistics(**c)


BAD = {
    "save object leaf": (
        lambda: CK.save(fresh(), {"x": np.array([None])}),
        TypeError, "checkpoint: leaf 'x' is object, made of a ndarray; only",
    ),
    "save masked": (
        lambda: CK.save(fresh(), {"x": np.ma.masked_equal([1,2], 1)}),
        TypeError, "checkpoint: leaf 'x' is a masked array, whose mask would be",
    ),
    "save metadata set": (
        lambda: CK.save(fresh(), ARRAYS, metadata={"x": {1}}),
        TypeError, "checkpoint: metadata must be what JSON can hold: Object of",
    ),
    "save_collection serving": (
        lambda: CK.save_collection(fresh(), collection(), state()._replace(slots={})),
        ValueError, "the state does not belong to this collection: slots are {},",
    ),
    "save_collection serving None": (
        lambda: CK.save_collection(fresh(), collection(), state()._replace(slots=None)),
        ValueError, "the state does not belong to this collection: slots are",
    ),
    "save_collection others text": (
        lambda: CK.save_collection(fresh(), collection(), state(), others={"x": "text"}),
        TypeError, "checkpoint: leaf 'others/x' is <U4, made of a str; only",
    ),
    "load file": (
        lambda: CK.load(file("a.bin", b"1")),
        FileNotFoundError, "is no checkpoint: it has no manifest.json. An interrupted",
    ),
    "load_collection None": (
        lambda: CK.load_collection(saved(), None),
        TypeError, "load_collection: collection must be of type", "got None (NoneType)",
    ),
    "load_collection others text": (
        lambda: CK.load_collection(saved(), collection(), others="w"),
        ValueError, "does not match: 'others' is missing; 'others/w' is not",
    ),
    "manager keep True": (
        lambda: manager(max_to_keep=True),
        TypeError, "CheckpointManager: max_to_keep must be an integer or None,", "got True (bool)",
    ),
    "manager coll save arrays": (
        lambda: manager(collection=collection()).save(ARRAYS, step=1),
        ValueError, "a state has its own step; leave step out.",
    ),
    "stats list": (
        lambda: st(max_ids_per_partition=[8]),
        TypeError, "SparseDenseMatmulInputStats: max_ids_per_partition must be", "got [8] (list)",
    ),
    "stats text": (
        lambda: st(max_ids_per_partition={"word": "8"}),
        TypeError, "max_ids_per_partition of stack 'word' must be an array of", "got '8' (str)",
    ),
    "stats negative": (
        lambda: client("n1").record(st(max_ids_per_partition={"word": [-1, 2]})),
        ValueError, "max_ids_per_partition of stack 'word' must be counts from 0", "got [-1, 2] (list)",
    ),
    "stats NaN": (
        lambda: client("n3").record(st(max_ids_per_partition={"word": [NAN, 2]})),
        ValueError, "max_ids_per_partition of stack 'word' must be counts from 0", "got [nan, 2] (list)",
    ),
    "stats text values": (
        lambda: client("n4").record(st(max_ids_per_partition={"word": ["a"]})),
        TypeError, "max_ids_per_partition of stack 'word' must be an array of", "got ['a'] (list)",
    ),
    "limits specs": (
        lambda: limits(stacks=[table()]),
        TypeError, "limits_from_statistics: stacks[0] must be of type", "got a value of type TableSpec",
    ),
    "limits cores text": (
        lambda: limits(num_sc_per_device="1"),
        TypeError, "limits_from_statistics: num_sc_per_device must be an", "got '1' (str)",
    ),
    "buffer set text": (
        lambda: st().set_required_buffer_size_per_device("word", "8", 1),
        TypeError, "SparseDenseMatmulInputStats.set_required_buffer_size_per_dev", "got '8' (str)",
    ),
    "buffer set cores 0": (
        lambda: st().set_required_buffer_size_per_device("word", 8, 0),
        ValueError, "SparseDenseMatmulInputStats.set_required_buffer_size_per_dev", "got 0",
    ),
    "report cores": (
        lambda: fdo.report([feature()], st(), 0), ValueError, "report: num_sc_per_device must be in [1, inf), got 0.",
    ),
}  # fmt: skip
