"""Buffers do not depend on the process that preprocesses a batch.

`test_cases` and `test_random_models` check the contents of the buffers.
"""

import jax
import numpy as np

from tests.sparsecore import small_world
from tests.world import assert_same


def test_processes_together_fill_what_one_process_fills():
    specs = small_world.placed_specs(4, 1)
    batch, _ = small_world.draw_batch()
    parts = []
    for process in range(2):
        local = {name: np.split(rows, 2)[process] for name, rows in batch.items()}
        parts.append(small_world.preprocess(specs, local, devices=4, local=2)[0])
    whole, _ = small_world.preprocess(specs, batch, devices=4)
    assert_same(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), whole)


def test_leading_dimension_counts_local_devices():
    specs = small_world.placed_specs(2, 2)
    batch, _ = small_world.draw_batch()
    flat, _ = small_world.preprocess(specs, batch, devices=2)
    deep, _ = small_world.preprocess(specs, batch, devices=2, has_leading_dimension=True)
    assert {array.shape[0] for array in jax.tree.leaves(deep)} == {2}
    assert_same(jax.tree.map(np.ravel, deep), flat)


def test_cancelling_weights_give_zero_gains():
    specs = small_world.place(small_world.feature_specs({"t": 8}, {"f": ("t", 2)}, combiner="mean"))
    ids, weights = np.asarray([[[1, 2], [3, 4]], [[1, -1], [0, 0]]])
    processed, _ = small_world.preprocess(specs, {"f": ids}, {"f": weights})
    assert processed.lhs_gains["t"][:4].tolist() == [0, 0, 0, 0]
