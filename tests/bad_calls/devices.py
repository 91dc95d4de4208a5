"""Bad calls of meshes, processes and caches."""

from functools import cache

from rsembed.storage import SetAssociativeCache


@cache
def cache():
    return SetAssociativeCache(2, num_ways=2, num_ids=9)


BAD = """
# Meshes and processes
rs.parallel.make_mesh(num_devices=0) => ValueError: make_mesh: 0 devices cannot be taken equally from 1 processes
rs.parallel.make_mesh(num_devices=9) => ValueError: make_mesh: 9 devices cannot be taken
rs.parallel.preempted(1) => RuntimeError: preempted ... init(preemption=True)
rs.parallel.launch("nothing.py") => ValueError: launch ... no script 'nothing.py'
rs.kernels.devices.tracing_for("v9").__enter__() => ValueError: unknown device 'v9'; choose one of v5p
# Caches
SetAssociativeCache(0, num_ids=9) => ValueError: num_sets must be ... 0
SetAssociativeCache(2**24 - 1, algorithm="lfu", num_ids=1) => ValueError: fewer than 16777215
SetAssociativeCache(1, num_ids=9, algorithm="fifo") => ValueError: 'lru' or 'lfu', got 'fifo'
cache().admit(np.array([1.0, 2.0])) => TypeError: ids ... integer ... float64
cache().unlock(np.array([0])) => ValueError: slot 0 is not locked
cache().unlock(np.array([9])) => ValueError: slots must be 0 to 3 ... 9
cache().unlock(np.array([0.5])) => TypeError: slots ... integer ... float64
"""

ACCEPTED = """
cache().find([1, 2]) => cache().find(np.array([1, 2]))
rs.parallel.make_mesh(num_devices=np.int64(2)).shape["shard"] => rs.parallel.make_mesh(num_devices=2).shape["shard"]
"""
