"""Calls that are refused, and backward passes that follow later lookups: no step is lost and none is half done."""

import jax
import numpy as np
import pytest

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
    backward(np.ones(output.shape, np.float32))
    assert [int(column.variable.get_value().step) for column in columns] == [1, 1]
    assert sok.export_rows(columns[0].variable)["keys"].tolist() == [1, 2]


def test_a_table_that_an_interrupted_step_took_over_says_how_to_go_on(context):
    layer = sok.All2AllDenseEmbedding(64, 4, 1, 1, name="taken")
    keys = np.arange(8).reshape(8, 1, 1)
    layer.vjp(keys)
    jax.tree.map(lambda array: array.delete(), layer.variable.get_value())
    calls = (layer, layer.vjp, lambda _: rows_of(layer), lambda _: layer.variable.counts())
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"table 'taken' has lost its rows .* Ctrl-C .* sok.load the latest dump"
        ):
            call(keys)
