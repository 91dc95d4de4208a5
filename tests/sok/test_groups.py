"""Groups of tables, columns in a scope, and the split of a model's variables by their kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import sok
from rsembed.optimizers import SGD, Adagrad
from rsembed.sok import lookups
from tests.sok.training import by_key, context, step, step_of
from tests.world import assert_same


@pytest.fixture(autouse=True)
def two_devices():
    context(2)


def variable(name, dim, **options):
    options = {"rows_per_device": 20, "optimizer": SGD(1.0)} | options
    return sok.embedding_variable(name, dim, **options)


IDS = [[2**40, 3], [3], [], [7, 7, 3]]
WEIGHTS = [[0.5, 2.0], [1.0], [], [1.0, 3.0, 0.25]]


def test_a_group_mixes_tables_dims_and_combiners():
    hashed = variable("hashed", 3)
    plain = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    small = [[i % 9 for i in bag] for bag in IDS]
    sums, means = sok.group_embedding_lookup_sparse(
        [hashed, nnx.Param(jnp.asarray(plain))],
        [IDS, small],
        ["sum", "mean"],
        sp_weights=[WEIGHTS, None],
        training=True,
    )
    assert hashed.num_rows == 0
    step_of(hashed, IDS)
    rows = by_key(hashed)
    for b, (bag, weights) in enumerate(zip(IDS, WEIGHTS, strict=True)):
        expected = np.zeros(3)
        for key, weight in zip(bag, weights, strict=True):
            expected += weight * rows[key]
        assert_allclose(sums[b], expected, atol=1e-6)
        expected = plain[small[b]].mean(axis=0) if bag else np.zeros(4)
        assert_allclose(means[b], expected, atol=1e-6)


def test_an_error_in_a_later_program_of_a_large_group_leaves_each_table_stepped_or_as_it_was(
    monkeypatch,
):
    def refuses_tracers(step):
        return 0.1 if step < 10 else 0.01

    monkeypatch.setattr(lookups, "STACKS_TOGETHER", 2)
    rules = {"v0": SGD(1.0), "v1": SGD(1.0), "failing": SGD(refuses_tracers)}
    variables = []
    for name, rule in rules.items():
        variables.append(variable(name, 2, initializer="ones", optimizer=rule))
    keys = [[[1], [2]]] * 3
    look_up = sok.group_embedding_lookup_vjp
    step(look_up, variables[:2], keys[:2], ["sum"] * 2, gradient=1.0)
    outputs, backward = look_up(variables, keys, ["sum"] * 3)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        backward([jnp.ones_like(output) for output in outputs])
    with pytest.raises(RuntimeError, match="a lookup trains once"):
        backward(outputs)
    assert [int(each.get_value().step) for each in variables] == [2, 2, 0]
    for each in variables[:2]:
        assert_same(by_key(each), {1: np.full(2, -1.0), 2: np.full(2, -1.0)})
    assert by_key(variables[2]) == {}


@pytest.mark.slow
def test_tables_that_are_alike_share_programs_and_have_the_bits_that_they_have_alone(
    monkeypatch, caplog
):
    """Seven tables with two rules. Each table has its own initializer object."""
    devices = context(1)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 2**40, (7, 8, 2))
    gradients = generator.normal(size=(7, 8, 3)).astype(np.float32)

    def trained(numbers):
        tables = []
        for number in numbers:
            tables.append(
                variable(
                    f"t{number}",
                    3,
                    initializer=lambda key, shape: jax.random.normal(key, shape),
                    optimizer=Adagrad((0.1, 0.2)[number % 2]),
                    context=devices,
                )
            )
        for _ in range(2):
            outputs, backward = sok.group_embedding_lookup_vjp(
                tables, [ids[n] for n in numbers], ["sum"] * len(tables)
            )
            backward([gradients[n] for n in numbers])
        return outputs, [sok.export_rows(table) for table in tables]

    outputs, rows = trained(range(7))
    monkeypatch.setattr(lookups, "STACKS_TOGETHER", 2)
    with jax.log_compiles():
        assert_same(trained(range(7)), (outputs, rows))
    # Two pairs of the first kind share a program. A pair of the second kind has one, and the last
    # table has one.
    for program in ("_lookup", "_step"):
        assert sum(f"Compiling jit({program})" in message for message in caplog.messages) == 3
    assert_same(trained([6]), ([outputs[6]], [rows[6]]))


def test_tables_that_differ_in_name_share_the_program_of_their_initial_rows(caplog):
    with jax.log_compiles():
        variables = [
            variable(f"t{number}", 7, rows_per_device=23, use_hashtable=use_hashtable)
            for use_hashtable in (True, False)
            for number in range(3)
        ]
    assert sum("Compiling jit(on_device)" in message for message in caplog.messages) == 2
    for own in variables:
        state = own.get_value()
        (params,) = state.tables.values()
        (expected,) = own.table.collection.init(state.key).tables.values()
        assert_array_equal(params.rows, expected.rows)
        assert_array_equal(*map(jax.random.key_data, (params.key, expected.key)))
    values = [sok.export_rows(own)["values"] for own in variables[3:]]
    assert not np.array_equal(values[0], values[1])


def test_columns_of_a_scope_are_one_lookup():
    options = {"rows_per_device": 9, "optimizer": SGD(1.0)}
    with sok.group_embedding_column_scope("item"):
        brand = sok.embedding_column("brand", 2, **options)
        shop = sok.embedding_column("shop", 3, **options)
    user = sok.embedding_column("user", 2, "sum", **options)
    columns = [brand, shop, user]
    batch = {"brand": IDS, "shop": [[5]] * 4, "user": (IDS, WEIGHTS)}
    out, backward = sok.input_layer_vjp(batch, columns)
    assert out.shape == (4, 7)
    # A key has no row before the first step.
    assert not np.any(sok.input_layer(batch, columns))
    backward(jnp.zeros_like(out).at[:, 2:5].set(1.0))
    (alone,) = sok.group_embedding_lookup_sparse([brand.variable], [IDS], [brand.combiner])
    assert_array_equal(out[:, :2], alone)
    assert_allclose(sok.input_layer(batch, columns)[:, 2:5], out[:, 2:5] - 4.0, atol=1e-6)


def test_columns_step_all_or_none():
    """A refused call changes no table, and a valid call steps all tables."""
    columns = [sok.embedding_column(name, 4, rows_per_device=64) for name in ("x", "y")]

    def steps():
        return [int(column.variable.get_value().step) for column in columns]

    output, backward = sok.input_layer_vjp({"x": [[1, 2]] * 8, "y": [[5]] * 8}, columns)
    for shape in ((8, 7), (8,), (7, 8)):
        with pytest.raises(ValueError, match="input_layer: the gradient has shape"):
            backward(np.ones(shape, np.float32))
    assert steps() == [0, 0]
    with pytest.raises(TypeError, match=r"'y'.*integers"):
        sok.input_layer_vjp({"x": [[11, 12]] * 8, "y": np.full((8, 1), 0.5)}, columns)
    backward(np.ones(output.shape, np.float32))
    assert steps() == [1, 1]
    assert list(by_key(columns[0].variable)) == [1, 2]


def test_embedding_variables_are_told_from_others():
    layer = sok.DistributedEmbedding("sum", 5, 2, 1, 1)
    others = list(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).values())
    assert len(others) == 2
    split = sok.split_embedding_variable_from_others([others[0], layer.variable, others[1]])
    assert split == ((layer.variable,), tuple(others))


def test_lookups_are_differentiated_by_their_weights():
    hashed = variable("weighted", 3, context=sok.Init())
    plain = jnp.arange(18.0).reshape(6, 3)
    ids = np.array([[1, 2]] * 7 + [[3, -1]])
    weights = jnp.full((8, 2), 0.5)
    step_of(hashed, ids)

    def total(weights, table):
        (pooled,) = sok.group_embedding_lookup_sparse(
            [table], [ids], ["mean"], sp_weights=[weights]
        )
        # The ids of the first sample are 1 and 2.
        return pooled[0].sum()

    for table, rows in ((hashed, by_key(hashed)), (plain, np.asarray(plain))):
        actual = jax.grad(total)(weights, table)
        sums = np.array([rows[1].sum(), rows[2].sum()])
        # The mean divides by the sum of the weights, which is 1.
        assert_allclose(actual[0], sums - sums.mean(), rtol=1e-5, atol=1e-6)
        assert not np.any(actual[1:])
