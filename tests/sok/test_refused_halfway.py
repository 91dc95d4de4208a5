"""Calls that are refused, and backward passes that follow later lookups: no step is lost and none is half done."""

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed import sok


@pytest.fixture
def context():
    return sok.Init()


def rows_of(layer):
    return sok.export_rows(layer.variable)


def test_columns_step_all_or_none(context):
    columns = [sok.embedding_column(name, 4, rows_per_device=64) for name in ("x", "y")]
    output, backward = sok.input_layer_vjp({"x": [[1, 2]] * 8, "y": [[5]] * 8}, columns)
    for shape in ((8, 9), (8, 7), (8,), (7, 8)):
        with pytest.raises(ValueError, match="input_layer: the gradient has shape"):
            backward(np.ones(shape, np.float32))
    assert [int(column.variable.get_value().step) for column in columns] == [0, 0]
    with pytest.raises(ValueError, match="'y': key -5"):
        sok.input_layer_vjp({"x": [[11, 12]] * 8, "y": [[-5]] * 8}, columns)
    assert sok.export_rows(columns[0].variable)["keys"].tolist() == [1, 2]
    backward(np.ones(output.shape, np.float32))
    assert [int(column.variable.get_value().step) for column in columns] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"slot_accumulator": np.zeros((2, 7), np.float32)}, "'slot_accumulator' of rows that are kept has shape"),
        ({"values": np.zeros((3, 4), np.float32)}, "'values' of rows that are kept has shape"),
        ({"keys": np.asarray([-1, 2])}, "distinct and not -1"),
        ({"keys": np.asarray([1.5, 2.5])}, "keys must be integers"),
        ({"keys": np.asarray([1, 1])}, "must be distinct"),
    ],
)
def test_a_second_tier_takes_rows_that_fit_or_none(changes, error):
    table = rs.TableSpec(
        name="h", vocabulary_size=8, embedding_dim=4, optimizer=rs.AdagradOptimizerSpec(0.1), storage=rs.Hashed()
    )
    collection = rs.EmbeddingCollection(rs.FeatureSpec(name="f", table_spec=table))
    state = collection.init(jax.random.key(0))
    state = collection.update(state, {"f": np.asarray([[1], [2]])}, {"f": np.ones((2, 4), np.float32)})
    tier = rs.SecondTier(collection, "h", num_rows=20)
    _, rows = collection.evict(state, "h", keep=0)
    tier.put(rows)
    before = tier.rows()
    with pytest.raises((ValueError, TypeError), match=error):
        tier.put({**rows, "values": rows["values"] + 1, **changes})
    jax.tree.map(np.testing.assert_array_equal, tier.rows(), before)
