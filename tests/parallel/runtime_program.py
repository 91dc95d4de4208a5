"""Program of test_runtime.py: a sum over all devices, then steps until something ends the program.

Arguments: `preempt` or `stay`, and for `preempt` the folder of the checkpoint that it saves at the
end.
"""

import os
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rsembed import checkpoint, parallel

mode, rows = sys.argv[1], 6
# With `stay`, a stopped process must be noticed soon. With `preempt`, a process on a slow machine
# must not count as dead.
heartbeat = 4 if mode == "stay" else 60
parallel.init(
    preemption=mode == "preempt", heartbeat_timeout_seconds=heartbeat, shutdown_timeout_seconds=10
)
parallel.init()  # a second call changes nothing
mesh = parallel.make_mesh()
process, num_local = jax.process_index(), jax.local_device_count()
rows_of_process = np.arange(num_local * rows * 3, dtype=np.float32).reshape(-1, 3) + 1000 * process
batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("shard")), rows_of_process)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("shard"), out_specs=P())
def total(x):
    return jax.lax.psum(x.sum(0), "shard")


print("sum", total(batch).tolist(), "of", batch.shape, "pid", os.getpid())
# With a collective in an endless loop, Python gets no error when the other process stops.
if mode == "stay":
    stay = jax.shard_map(
        lambda x: jax.lax.while_loop(
            lambda x: x.sum() != -1, lambda x: jax.lax.pmax(x, "shard"), x
        ),
        mesh=mesh,
        in_specs=P("shard"),
        out_specs=P("shard"),
        check_vma=False,
    )
    jax.jit(stay)(batch).block_until_ready()
for step in range(1, 10_000):
    total(batch).block_until_ready()
    if parallel.preempted(step):
        # Some of these chunks have rows of two shards, and some have rows of two processes.
        checkpoint.arrays.CHUNK_BYTES = 5 * 3 * 4
        equal = rows_of_process[:5] - 1000 * process, np.float32(2.5)
        everywhere = [
            jax.make_array_from_process_local_data(NamedSharding(mesh, P()), array)
            for array in equal
        ]
        columns = NamedSharding(
            Mesh(np.asarray(jax.devices()).reshape(2, 2), ("process", "column")), P(None, "column")
        )
        in_both = jax.make_array_from_callback(
            (4, 6), columns, lambda index: np.arange(24).reshape(4, 6)[index]
        )
        tree = {"table": batch, "slots": (*everywhere, np.arange(3)), "in_both": in_both}
        checkpoint.save(sys.argv[2], tree, step=step)
        again = checkpoint.load(sys.argv[2], tree).tree["table"]
        print("left at", step, "restored", again.sharding == batch.sharding, total(again).tolist())
        break
    time.sleep(0.02)
