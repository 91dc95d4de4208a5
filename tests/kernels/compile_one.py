"""Compiles one program for a TPU, which this machine may lack, and prints statistics as JSON.

    python -m tests.kernels.compile_one v6e adam

Tests run it in a child process, because the TPU compiler ends the process if it cannot compile a
program.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rsembed.kernels import sparsecore
from rsembed.kernels.contract import Call, CallGradients, IdList
from rsembed.sparsecore.linen import embed_optimizer
from tests.kernels.cases import RULES, step_of
from tests.sparsecore import tutorial_program

NUM_ROWS, DIM, NUM_IDS, NUM_BAGS = 1 << 20, 32, 4096, 512
TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Names in `jax.experimental.topologies` of four chips of each TPU with SparseCores."""
CORES = {"v5p": 4, "v6e": 2, "tpu7x": 2}
Shape = jax.ShapeDtypeStruct
TABLE = Shape((NUM_ROWS, DIM), jnp.float32)
ROWS, OFFSETS = Shape((NUM_IDS,), jnp.int32), Shape((NUM_BAGS + 1,), jnp.int32)


def lookup(table, rows, offsets):
    call = Call.of([IdList(rows, offsets), IdList.single(rows)], ["mean", "sum"])
    return sparsecore.lookup((table,), call)


def update_with(rule):
    def update(table, slots, rows, offsets, d_output):
        gradients = CallGradients(Call.of([IdList(rows, offsets)], ["sum"]), (d_output,), (DIM,))
        return sparsecore.update(table, slots, gradients, step_of(rule))

    d_output = Shape((NUM_BAGS, DIM), jnp.float32)
    return update, (TABLE, jax.eval_shape(rule.init_slots, TABLE), ROWS, OFFSETS, d_output)


def compile_on_one(chip, case):
    """A kernel lowered for the first device, and the sizes of its donated state and table in bytes.

    The table has the layout that the SparseCore kernels need.
    """
    if case == "lookup":
        function, shapes, donate = lookup, (TABLE, ROWS, OFFSETS), ()
    else:
        (function, shapes), donate = update_with(RULES[case]), (0, 1)
    mesh = topology(chip, 1)
    whole = NamedSharding(mesh, P())

    def layout(shape):
        return sparsecore.row_layout(whole) if shape.shape == TABLE.shape else whole

    def placed(tree):
        return jax.tree.map(layout, tree)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        outputs = placed(jax.eval_shape(function, *shapes))
        jitted = jax.jit(
            function, in_shardings=placed(shapes), out_shardings=outputs, donate_argnums=donate
        )
        lowered = jitted.trace(*shapes).lower(lowering_platforms=("tpu",))
    state = jax.tree.leaves(shapes[:2]) if donate else []
    return lowered, sum(size_of(s) for s in state), size_of(TABLE)


def compile_tutorial_step(chip, case):
    """The lowered training step of the Shakespeare tutorial for all devices of the topology.

    Also returns the sizes of a device's part of the state and of the table in bytes. The table is
    so large that a copy of it shows in the memory statistics of the compiled program.
    """
    mesh, num_cores = topology(chip), CORES[chip]
    num_classes = tutorial_program.VOCABULARY
    tutorial_program.VOCABULARY = 1 << 24
    specs = tutorial_program.word_specs(mesh.size, num_cores)
    tutorial_program.VOCABULARY = num_classes
    model = tutorial_program.NextWord(specs, mesh, False)
    contexts, labels = tutorial_program.make_batch(np.arange(1000, dtype=np.int32))
    preprocessed, _ = tutorial_program.preprocess(contexts, specs, mesh.size, mesh.size, num_cores)
    inputs = jax.tree.map(lambda array: Shape(array.shape, array.dtype), preprocessed)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)
    shardings = nn.get_sharding(params, mesh)
    variables = shardings["params"]["SparseCoreEmbed_0"]
    variables["sc_embedding_variables"] = sparsecore.row_layout(variables["sc_embedding_variables"])
    tx = embed_optimizer.create_optimizer_for_sc_model(params, optax.adam(0.005))
    opt_state = jax.eval_shape(tx.init, params)

    jitted = tutorial_program.step_of(model, tx, shardings)
    shapes = (params, inputs, Shape(labels.shape, labels.dtype), opt_state)
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("tpu",))
    table = (1 << 24) // mesh.size * tutorial_program.DIM * 4
    # The state is the table and the two moments of Adam.
    return lowered, 3 * table, table


def topology(chip, num_devices=None):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    return Mesh(np.array(devices[:num_devices]), ("device",))


def size_of(shape):
    return int(np.prod(shape.shape)) * shape.dtype.itemsize


def main(chip, case):
    make = compile_tutorial_step if case == "tutorial" else compile_on_one
    lowered, state_bytes, table_bytes = make(chip, case)
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    record = {
        "sparsecore": text.lower().count("sparsecore"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "state_bytes": state_bytes,
        "table_bytes": table_bytes,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
