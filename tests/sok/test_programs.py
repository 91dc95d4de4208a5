"""Tables of a large group that are alike share what is compiled, and stay what each is alone."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import rsembed as rs
from rsembed import sok
from rsembed.sok import lookups

BATCH, DIM, TOGETHER = 8, 4, 2


def variable(kind, number, context):
    """Of kind 1 with a rule of its own; every one has an initializer that is nobody else's."""
    return sok.embedding_variable(
        f"{kind}_{number}",
        DIM,
        rows_per_device=16,
        initializer=lambda key, shape: jax.random.normal(key, shape),
        optimizer=rs.AdagradOptimizerSpec((0.1, 0.2)[kind]),
        context=context,
        rngs=nnx.Rngs(0),
    )


def train(variables, ids, gradients):
    """Outputs of two steps."""
    found = []
    for _ in range(2):
        outputs, backward = sok.group_embedding_lookup_vjp(variables, ids, ["sum"] * len(variables))
        backward(gradients)
        found.append(outputs)
    return found, sok.group_embedding_lookup_sparse(variables, ids, ["sum"] * len(variables))


def test_every_table_has_the_bits_that_it_has_alone(monkeypatch, caplog):
    monkeypatch.setattr(lookups, "STACKS_TOGETHER", TOGETHER)
    context = sok.Init(mesh=Mesh(np.asarray(jax.devices()[:2]), ("shard",)))
    kinds, generator = (0, 1, 0, 1, 1, 0, 0, 1), np.random.default_rng(0)
    ids = [generator.integers(0, 2**40, (BATCH, 2)) for _ in kinds]
    gradients = [generator.normal(size=(BATCH, DIM)).astype(np.float32) for _ in kinds]
    together = [variable(kind, number, context) for number, kind in enumerate(kinds)]
    with jax.log_compiles():
        found, evaluated = train(together, ids, gradients)
    for program, expected in (("_lookup", 4), ("_step", 2)):  # of two kinds; a lookup is one for training, or not
        assert sum(f"Compiling jit({program})" in message for message in caplog.messages) == expected
    for number in (0, 4, 7):  # of both kinds, and of both programs of a kind
        own = variable(kinds[number], number, context)
        alone, read = train([own], ids[number : number + 1], gradients[number : number + 1])
        for of_all, (expected,) in zip(found, alone, strict=True):
            np.testing.assert_array_equal(of_all[number], expected)
        np.testing.assert_array_equal(evaluated[number], read[0])
        rows, expected_rows = sok.export_rows(together[number]), sok.export_rows(own)
        assert rows.keys() == expected_rows.keys()
        for name, array in rows.items():
            np.testing.assert_array_equal(array, expected_rows[name])
