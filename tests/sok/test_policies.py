"""Names of DeepRec and SOK for admission, eviction and initial values."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import sok
from tests.sok.training import context

DIM = 2


def variable(rows=8, **options):
    return sok.embedding_variable("t", DIM, rows_per_device=rows, context=context(1), **options)


def test_a_filter_option_says_what_the_admission_count_of_the_core_says():
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(3))
    assert variable(ev_option=option).table == variable(admission_count=3).table


def test_eviction_takes_rows_by_steps_and_by_half_of_their_squares():
    """A row with exactly the threshold stays, as in the original."""
    option = sok.EmbeddingVariableOption(evict_option=sok.L2WeightEvict(1.0))
    table = variable(16, ev_option=option)
    values = np.asarray([[1, 1], [1, 0.999], [2, 0], [0, 0], [0, 1.5]], np.float32)
    last_step = np.asarray([0, 0, 3, 3, 9])
    sok.assign_rows(table, {"keys": np.arange(5), "values": values, "last_step": last_step})
    evicted = table.evict()
    assert evicted["keys"].tolist() == [1, 3] and evicted["last_step"].tolist() == [0, 3]
    assert_array_equal(evicted["values"], values[[1, 3]])
    sok.assign_rows(table, evicted)
    table.set_value(table.get_value()._replace(step=jnp.asarray(5, jnp.int32)))
    assert table.evict(sok.GlobalStepEvict(2))["keys"].tolist() == [0, 1]
    assert table.evict(keep=1)["keys"].tolist() == [2, 3]
    assert table.num_rows == 1


@pytest.mark.parametrize(
    ("name", "low", "high", "deviation"),
    [
        ("RandomUniform", -0.05, 0.05, 0.1 / 12**0.5),
        ("random_normal", -0.4, 0.4, 0.05),
        ("TruncatedNormal", -0.1, 0.1, 0.044),
        (-0.5, -0.5, -0.5, 0),
    ],
)
def test_rows_start_as_the_names_of_keras_say(name, low, high, deviation):
    table = variable(2048, initializer=name, use_hashtable=False)
    values = sok.export_rows(table)["values"]
    assert low <= values.min() <= values.max() <= high
    assert_allclose(values.std(), deviation, rtol=0.05)


def test_row_numbers_beyond_the_table_count_in_means_as_keys_without_a_row_do():
    """Outside `jit`, such keys are refused."""
    table = variable(initializer=2.0, use_hashtable=False)
    keys = sok.split_keys(np.asarray([[0, 1, -1], [0, 1, 12], [12, 13, 14]]))
    look_up = nnx.jit(
        lambda table, keys: sok.group_embedding_lookup_vjp([table], [keys], ["mean"])[0][0]
    )
    assert_allclose(look_up(table, keys)[:, 0], [2, 4 / 3, 0], rtol=1e-6)
