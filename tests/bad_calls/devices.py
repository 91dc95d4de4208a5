"""Bad calls of meshes, processes, placement plans and caches."""

import functools

import numpy as np

from rsembed import parallel
from rsembed.caching import (
    BackingStore,
    CacheStatistics,
    RowStore,
    SetAssociativeCache,
    StorageFolder,
    miss_ratio_curve,
    num_sets_for,
    reuse_distances,
    set_of,
)
from rsembed.fingerprint import Fingerprint
from rsembed.kernels import api
from tests.bad_calls.world import FOLDER, feature, mesh, table

NAN = float("nan")
IDS = np.array([1, 2, 1, 3])


def plan(*features, **options):
    return parallel.plan_placement(list(features) or [feature(input_shape=(8, 1))], **{"num_devices": 2} | options)


def narrow():
    return feature(table_spec=table(embedding_dim=3), input_shape=(8, 1))


def load(**changes):
    sizes = {"local_batch": 8, "num_features": 1, "ids_per_sample": 1, "embedding_dim": 4}
    return parallel.device_load(parallel.zipf_ids(9, 1.0), **sizes | changes)


@functools.cache
def cache():
    return SetAssociativeCache(2, num_ways=2, num_ids=9)


@functools.cache
def store():
    return RowStore.in_memory((9, 4), np.float32)


def backing():
    return BackingStore([store(), RowStore.in_memory((9,), np.float32)])


BAD = {
    # Meshes and processes
    "no device": (lambda: parallel.make_mesh(num_devices=0), ValueError, "make_mesh", "0 devices"),
    "more devices than there are": (
        lambda: parallel.make_mesh(num_devices=99), ValueError, "make_mesh", "99 devices", "JAX_NUM_CPU_DEVICES",
    ),
    "devices as text": (
        lambda: parallel.make_mesh(num_devices="2"), TypeError, "make_mesh", "num_devices", "integer", "'2'",
    ),
    "samples that devices cannot share": (
        lambda: parallel.put_global({"ids": np.ones(3)}, mesh()), ValueError, "put_global: array ['ids']", "(3,)",
        "2 devices",
    ),
    "a number for all devices": (lambda: parallel.put_global(3, mesh()), ValueError, "put_global: array given", "()"),
    "texts for all devices": (
        lambda: parallel.put_global({"w": np.array(["a", "b"])}, mesh()), TypeError, "put_global: array ['w']", "<U1",
    ),
    "keys that would be cut": (
        lambda: parallel.put_global({"k": np.array([2**40, 1])}, mesh()), ValueError, "array ['k']", "int32",
        "two arrays of 32",
    ),
    "an axis the mesh has not": (
        lambda: parallel.put_global(np.ones(2), mesh(), "x"), ValueError, "put_global", "axis 'x'", "('shard',)",
    ),
    "a mesh that is none": (lambda: parallel.put_global(np.ones(2), 2), TypeError, "put_global", "mesh", "int"),
    "no time to wait": (
        lambda: parallel.init(heartbeat_timeout_seconds=0), ValueError, "init: timeouts", "at least 1", "0",
    ),
    "time as text": (
        lambda: parallel.init(shutdown_timeout_seconds="30"), TypeError, "init", "shutdown_timeout_seconds", "'30'",
    ),
    "preemption that nobody asked for": (
        lambda: parallel.preempted(1), RuntimeError, "preempted", "init(preemption=True)",
    ),
    "no process": (lambda: parallel.launch("x.py", num_processes=0), ValueError, "launch", "at least one process", "0"),
    "processes as text": (
        lambda: parallel.launch("x.py", num_processes="2"), TypeError, "launch", "num_processes", "'2'",
    ),
    "no script": (lambda: parallel.launch("nothing.py"), ValueError, "launch", "no script 'nothing.py'"),
    # Plans
    "a plan for no device": (lambda: plan(num_devices=0), ValueError, "plan_placement: num_devices", "[1, inf)", "0"),
    "a plan for devices as text": (lambda: plan(num_devices="2"), TypeError, "num_devices", "integer", "'2'"),
    "a plan of features without shape": (lambda: plan(feature()), ValueError, "feature 'title'", "input_shape is None"),
    "a plan of nodes that are not full": (
        lambda: plan(feature(input_shape=(18, 1)), num_devices=9), ValueError, "9 devices", "nodes of 8",
    ),
    "a placement of an unknown table": (
        lambda: plan(placements={"wrod": "row_wise"}), ValueError, "placements", "'wrod'", "['word']", "row_wise",
    ),
    "columns that do not divide": (
        lambda: plan(narrow(), placements={"word": "column_wise"}), NotImplementedError, "table 'word'", "3 columns",
        "2 devices",
    ),
    "counts of other rows": (
        lambda: plan(id_counts={"word": np.ones(8)}), ValueError, "table 'word'", "9 rows", "(8,)",
    ),
    "counts of an unknown table": (
        lambda: plan(id_counts={"wrod": np.ones(9)}), ValueError, "id_counts", "'wrod'", "['word']",
    ),
    "an exponent of NaN": (lambda: plan(zipf_exponent=NAN), ValueError, "exponent", "nan"),
    "padding below 1": (lambda: plan(padding=0.5), ValueError, "padding", "[1, inf)", "0.5"),
    "no memory": (
        lambda: plan(hardware=parallel.Hardware(memory_bytes=1)), parallel.PlacementError, "table 'word' does not fit",
        "more devices",
    ),
    "the place of an unknown table": (lambda: plan().table("wrod"), KeyError, "'wrod'", "'word'"),
    "links without speed": (
        lambda: parallel.Hardware(inter_node_bytes_per_second=0.0), ValueError, "Hardware: inter_node_bytes_per_second",
        "0.0",
    ),
    "ids of no vocabulary": (lambda: parallel.zipf_ids(0, 1.0), ValueError, "zipf_ids: vocabulary_size", "0"),
    "a negative exponent": (lambda: parallel.zipf_ids(9, -1.0), ValueError, "zipf_ids: exponent", "-1.0"),
    "a vocabulary as text": (
        lambda: parallel.zipf_ids("9", 1.0), TypeError, "zipf_ids: vocabulary_size", "integer", "'9'",
    ),
    "counts of nothing": (lambda: parallel.observed_ids(np.zeros(3)), ValueError, "observed_ids", "above 0"),
    "counts of texts": (lambda: parallel.observed_ids(np.array(["a"])), TypeError, "observed_ids", "numbers", "<U1"),
    "an unknown path": (lambda: parallel.bytes_sent("dedpu", load(), 2), ValueError, "'dedpu'", "dedup"),
    "a batch of less than nothing": (lambda: load(local_batch=-1), ValueError, "local_batch", "-1"),
    # Caches
    "no set": (lambda: SetAssociativeCache(0, num_ids=9), ValueError, "num_sets=0", "at least 1"),
    "half a set": (lambda: SetAssociativeCache(1.5, num_ids=9), TypeError, "num_sets", "integer", "1.5"),
    "an algorithm nobody knows": (
        lambda: SetAssociativeCache(1, num_ids=9, algorithm="fifo"), ValueError, "'fifo'", "'lru' or 'lfu'",
    ),
    "admitted floats": (lambda: cache().admit(IDS / 1), TypeError, "ids", "integer", "float64"),
    "a slot that is not locked": (lambda: cache().unlock(np.array([0])), ValueError, "slot 0 is not locked"),
    "a slot that is not there": (lambda: cache().unlock(np.array([9])), ValueError, "slots must be 0 to 3", "9"),
    "slots of floats": (lambda: cache().unlock(np.array([0.5])), TypeError, "slots", "integer", "float64"),
    "a load above all rows": (lambda: num_sets_for(9, 1.5, row_bytes=16), ValueError, "load_factor=1.5", "from 0 to 1"),
    "too little memory": (
        lambda: num_sets_for(9, 0.5, row_bytes=16, free_bytes=10), ValueError, "not even one set", "10 free bytes",
    ),
    "rows of no bytes": (
        lambda: num_sets_for(9, 0.5, row_bytes=0, free_bytes=10), ValueError, "num_sets_for: row_bytes", "[1, inf)",
        "0",
    ),
    "sets of none": (lambda: set_of(IDS, 0), ValueError, "num_sets", "at least 1", "0"),
    "a row that is not there": (lambda: store().read(np.array([9])), IndexError, "rows must lie in 0 to 8", "9"),
    "rows of floats": (lambda: store().read(np.array([0.5])), TypeError, "row", "integer", "float64"),
    "values of another shape": (
        lambda: store().write(np.array([0]), np.ones((1, 3), np.float32)), ValueError, "rows of shape (4,)", "(1, 3)",
    ),
    "a store over a list": (lambda: RowStore([[1.0]]), TypeError, "values", "array", "list"),
    "a file that cannot be made": (lambda: RowStore.in_file("/dev/null/x", (2, 2), np.float32), OSError, "/dev/null/x"),
    "a file of another size": (lambda: _other_size(), ValueError, "rows.bin", "bytes"),
    "a store of no stores": (lambda: BackingStore([]), ValueError, "BackingStore", "at least one"),
    "too few arrays": (lambda: backing().write(np.array([0]), [np.ones((1, 4))]), ValueError, "1 arrays", "2 stores"),
    "a folder of other tables": (lambda: _other_folder(), ValueError, "another module", "rows"),
    "no stream": (lambda: miss_ratio_curve(IDS[:0], np.array([1])), ValueError, "no id"),
    "a fraction above 1": (
        lambda: miss_ratio_curve(IDS, np.array([1]), sample_fraction=2.0), ValueError, "sample_fraction=2.0",
    ),
    "a stream of floats": (lambda: reuse_distances(IDS / 2), TypeError, "ids", "integer", "float64"),
    "a negative size": (lambda: miss_ratio_curve(IDS, np.array([-1])), ValueError, "cache_rows", "-1"),
    "counts of other groups": (
        lambda: CacheStatistics(2).record(cache().admit(IDS).counts, np.zeros(3, np.int64)), ValueError, "3 groups",
        "num_groups=2",
    ),
    "negative groups": (lambda: CacheStatistics(-1), ValueError, "num_groups", "[0, inf)", "-1"),
    # Kernels
    "an unknown kernel": (lambda: api.check_implementation("gpus"), ValueError, "'gpus'", "native", "reference"),
}  # fmt: skip


def _other_size():
    RowStore.in_file(FOLDER / "rows.bin", (2, 2), np.float32).flush()
    return RowStore.in_file(FOLDER / "rows.bin", (3, 2), np.float32)


def _other_folder():
    StorageFolder(FOLDER / "folder", Fingerprint.of({"word": {"rows": 9}})).commit(0)
    return StorageFolder(FOLDER / "folder", Fingerprint.of({"word": {"rows": 8}}))


ACCEPTED = {
    "ids as a list": (lambda: cache().find([1, 2]), lambda: cache().find(np.array([1, 2]))),
    "a stream as a list": (lambda: reuse_distances([1, 2, 1, 3]), lambda: reuse_distances(IDS)),
    "sizes of a cache as a list": (lambda: miss_ratio_curve(IDS, [1]), lambda: miss_ratio_curve(IDS, np.array([1]))),

    "a mesh of numpy's number": (
        lambda: parallel.make_mesh(num_devices=np.int64(2)).shape["shard"],
        lambda: parallel.make_mesh(num_devices=2).shape["shard"],
    ),
    "ids of int8": (lambda: reuse_distances(IDS.astype(np.int8)), lambda: reuse_distances(IDS)),
}  # fmt: skip
