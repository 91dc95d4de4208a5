"""Groups of tables, columns in a scope, and the split of a model's variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import sok
from rsembed.optimizers import SGD, Adagrad
from rsembed.sok import lookups
from tests.sok.training import context
from tests.world import assert_same


@pytest.fixture(autouse=True)
def two_devices():
    context(2)


def variable(name, dim, **options):
    options = {"rows_per_device": 20, "optimizer": SGD(1.0)} | options
    return sok.embedding_variable(name, dim, **options)


def insert(variable, ids):
    """Keys get their rows in a step without gradients, which leaves what they start from."""
    (output,), backward = sok.group_embedding_lookup_vjp([variable], [ids], ["sum"])
    backward([jnp.zeros_like(output)])


IDS = [[2**40, 3], [3], [], [7, 7, 3]]
WEIGHTS = [[0.5, 2.0], [1.0], [], [1.0, 3.0, 0.25]]


def test_a_group_mixes_tables_dims_and_combiners():
    hashed, plain = (
        variable("hashed", 3),
        np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32),
    )
    small = [[i % 9 for i in bag] for bag in IDS]
    args = ([hashed, nnx.Param(jnp.asarray(plain))], [IDS, small], ["sum", "mean"])
    outs = sok.group_embedding_lookup_sparse(*args, sp_weights=[WEIGHTS, None], training=True)
    assert hashed.num_rows == 0
    insert(hashed, IDS)
    rows = sok.export_rows(hashed)
    by_key = dict(zip(rows["keys"].tolist(), rows["values"], strict=True))
    for b, (bag, own) in enumerate(zip(IDS, WEIGHTS, strict=True)):
        expected = sum((w * by_key[i] for i, w in zip(bag, own, strict=True)), start=np.zeros(3))
        assert_allclose(outs[0][b], expected, atol=1e-6)
        mean = np.mean([plain[i] for i in small[b]], axis=0) if bag else np.zeros(4)
        assert_allclose(outs[1][b], mean, atol=1e-6)


def test_an_error_in_a_later_program_of_a_large_group_leaves_each_table_stepped_or_as_it_was(
    monkeypatch,
):
    def refuses_tracers(step):
        return 0.1 if step < 10 else 0.01

    monkeypatch.setattr(lookups, "STACKS_TOGETHER", 2)
    rules = {"v0": SGD(1.0), "v1": SGD(1.0), "failing": SGD(refuses_tracers)}
    variables = [
        variable(name, 2, initializer="ones", optimizer=rule) for name, rule in rules.items()
    ]
    keys = [[[1], [2]]] * 3
    outputs, backward = sok.group_embedding_lookup_vjp(variables[:2], keys[:2], ["sum"] * 2)
    backward([jnp.ones_like(output) for output in outputs])
    outputs, backward = sok.group_embedding_lookup_vjp(variables, keys, ["sum"] * 3)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        backward([jnp.ones_like(output) for output in outputs])
    with pytest.raises(RuntimeError, match="a lookup trains once"):
        backward(outputs)
    assert [int(own.get_value().step) for own in variables] == [2, 2, 0]
    for own, keys_of_own in zip(variables, ([1, 2], [1, 2], []), strict=True):
        rows = sok.export_rows(own)
        assert rows["keys"].tolist() == keys_of_own
        assert_array_equal(rows["values"], np.full((len(keys_of_own), 2), -1.0))


def test_tables_that_are_alike_share_programs_and_have_the_bits_that_they_have_alone(
    monkeypatch, caplog
):
    """Seven tables of two rules; each has an initializer that is nobody else's."""
    generator, devices = np.random.default_rng(0), context(1)
    ids = [generator.integers(0, 2**40, (8, 2)) for _ in range(7)]
    gradients = [generator.normal(size=(8, 3)).astype(np.float32) for _ in ids]

    def trained(numbers):
        own = []
        for number in numbers:
            start, rule = (
                (lambda key, shape: jax.random.normal(key, shape)),
                Adagrad((0.1, 0.2)[number % 2]),
            )
            own.append(
                variable(f"t{number}", 3, initializer=start, optimizer=rule, context=devices)
            )
        for _ in range(2):
            found, backward = sok.group_embedding_lookup_vjp(
                own, [ids[n] for n in numbers], ["sum"] * len(own)
            )
            backward([gradients[n] for n in numbers])
        return found, [sok.export_rows(table) for table in own]

    together, rows = trained(range(7))
    monkeypatch.setattr(lookups, "STACKS_TOGETHER", 2)
    with jax.log_compiles():
        in_pairs, rows_of_pairs = trained(range(7))
    # Two pairs of one kind share a program; one pair of the other and one table have their own.
    for program in (
        "_lookup",
        "_step",
    ):
        assert sum(f"Compiling jit({program})" in message for message in caplog.messages) == 3
    (alone,), (rows_alone,) = trained([6])
    assert_array_equal(together[6], alone)
    assert_same((rows[6], together), (rows_alone, in_pairs))
    assert_same(rows, rows_of_pairs)


def test_columns_of_a_scope_are_one_lookup():
    with sok.group_embedding_column_scope("item"):
        columns = [
            sok.embedding_column(f, dim, rows_per_device=9, optimizer=SGD(1.0))
            for f, dim in (("brand", 2), ("shop", 3))
        ]
    alone = sok.embedding_column("user", 2, "sum", rows_per_device=9, optimizer=SGD(1.0))
    batch = {"brand": IDS, "shop": [[5]] * 4, "user": (IDS, WEIGHTS)}
    out, backward = sok.input_layer_vjp(batch, [*columns, alone])
    assert out.shape == (4, 7)
    parts = [
        sok.group_embedding_lookup_sparse([c.variable], [IDS], [c.combiner]) for c in columns[:1]
    ]
    # No key has a row before it is stepped.
    assert_array_equal(parts[0][0], np.zeros((4, 2)))
    backward(jnp.zeros_like(out).at[:, 2:5].set(1.0))
    parts = [
        sok.group_embedding_lookup_sparse([c.variable], [IDS], [c.combiner]) for c in columns[:1]
    ]
    assert_array_equal(out[:, :2], parts[0][0])
    assert_allclose(sok.input_layer(batch, [*columns, alone])[:, 2:5], out[:, 2:5] - 4.0, atol=1e-6)


def test_columns_step_all_or_none():
    """Calls that are refused lose no step, and none is half done."""
    columns = [sok.embedding_column(name, 4, rows_per_device=64) for name in ("x", "y")]
    output, backward = sok.input_layer_vjp({"x": [[1, 2]] * 8, "y": [[5]] * 8}, columns)
    for shape in ((8, 9), (8, 7), (8,), (7, 8)):
        with pytest.raises(ValueError, match="input_layer: the gradient has shape"):
            backward(np.ones(shape, np.float32))
    assert [int(column.variable.get_value().step) for column in columns] == [0, 0]
    with pytest.raises(TypeError, match=r"'y'.*integers"):
        sok.input_layer_vjp({"x": [[11, 12]] * 8, "y": np.full((8, 1), 0.5)}, columns)
    backward(np.ones(output.shape, np.float32))
    assert [int(column.variable.get_value().step) for column in columns] == [1, 1]
    assert sok.export_rows(columns[0].variable)["keys"].tolist() == [1, 2]


def test_embedding_variables_are_told_from_others():
    model = nnx.List(
        [nnx.Linear(2, 3, rngs=nnx.Rngs(0)), sok.DistributedEmbedding("sum", 5, 2, 1, 1)]
    )
    variables = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]
    own, others = sok.split_embedding_variable_from_others(variables)
    assert own == (model[1].variable,) and len(others) == len(variables) - 1 >= 2


@pytest.mark.slow_rows("mean")
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_lookups_are_differentiated_by_their_weights(combiner):
    variable = sok.embedding_variable("weighted", 3, rows_per_device=8, context=sok.Init())
    plain = jnp.arange(18.0).reshape(6, 3)
    ids, weights = np.array([[1, 2]] * 7 + [[3, -1]]), np.full((8, 2), 0.5, np.float32)
    insert(variable, ids)
    rows = sok.export_rows(variable)
    tables = [
        dict(zip(rows["keys"].tolist(), rows["values"], strict=True)),
        dict(enumerate(np.asarray(plain))),
    ]

    def total(weights, table):
        (pooled,) = sok.group_embedding_lookup_sparse(
            [table], [ids], [combiner], sp_weights=[weights]
        )
        return pooled[0].sum()  # of the first sample, whose ids are 1 and 2

    for table, known in zip((variable, plain), tables, strict=True):
        found = jax.grad(total)(jnp.asarray(weights), table)
        sums = np.array([known[1].sum(), known[2].sum()])
        # Divided by the sum of the weights, which is 1.
        expected = sums if combiner == "sum" else sums - sums.mean()
        assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
        assert not np.asarray(found[1:]).any()
