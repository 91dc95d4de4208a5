"""Bad calls of meshes, processes and caches."""

import functools

import numpy as np

from rsembed import parallel
from rsembed.caching import CacheStatistics, SetAssociativeCache
from rsembed.kernels import api
from tests.bad_calls.world import mesh

IDS = np.array([1, 2, 1, 3])


@functools.cache
def cache():
    return SetAssociativeCache(2, num_ways=2, num_ids=9)


BAD = {
    # Meshes and processes
    "no device": (lambda: parallel.make_mesh(num_devices=0), ValueError, "make_mesh", "0 devices"),
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
    "preemption that nobody asked for": (
        lambda: parallel.preempted(1), RuntimeError, "preempted", "init(preemption=True)",
    ),
    "no script": (lambda: parallel.launch("nothing.py"), ValueError, "launch", "no script 'nothing.py'"),
    # Caches
    "no set": (lambda: SetAssociativeCache(0, num_ids=9), ValueError, "num_sets=0", "at least 1"),
    "more sets than a count leaves room for": (
        lambda: SetAssociativeCache(2**24 - 1, algorithm="lfu", num_ids=1), ValueError, "fewer than 16777215",
    ),
    "an algorithm nobody knows": (
        lambda: SetAssociativeCache(1, num_ids=9, algorithm="fifo"), ValueError, "'fifo'", "'lru' or 'lfu'",
    ),
    "admitted floats": (lambda: cache().admit(IDS / 1), TypeError, "ids", "integer", "float64"),
    "a slot that is not locked": (lambda: cache().unlock(np.array([0])), ValueError, "slot 0 is not locked"),
    "a slot that is not there": (lambda: cache().unlock(np.array([9])), ValueError, "slots must be 0 to 3", "9"),
    "slots of floats": (lambda: cache().unlock(np.array([0.5])), TypeError, "slots", "integer", "float64"),
    "counts of other groups": (
        lambda: CacheStatistics(2).record(cache().admit(IDS).counts, np.zeros(3, np.int64)), ValueError, "3 groups",
        "num_groups=2",
    ),
    # Kernels
    "an unknown kernel": (lambda: api.check_implementation("gpus"), ValueError, "'gpus'", "native", "reference"),
}  # fmt: skip


ACCEPTED = {
    "ids as a list": (lambda: cache().find([1, 2]), lambda: cache().find(np.array([1, 2]))),

    "a mesh of numpy's number": (
        lambda: parallel.make_mesh(num_devices=np.int64(2)).shape["shard"],
        lambda: parallel.make_mesh(num_devices=2).shape["shard"],
    ),
}  # fmt: skip
