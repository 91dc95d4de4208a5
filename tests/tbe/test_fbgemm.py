"""The module beside the original on the same numbers, wherever `fbgemm_gpu` can be imported.

The worked cases of `test_cases.py` hold numbers that it printed and need no installation; this goes through more
combinations. What its CPU build does wrong is marked by name: such a case must differ, so that a repaired build is
noticed.
"""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from rsembed import tbe as rt

try:
    with warnings.catch_warnings():  # not ours to mend
        warnings.simplefilter("ignore")
        import torch  # isort: skip  # fbgemm_gpu needs its libraries
        from fbgemm_gpu import (
            split_table_batched_embeddings_ops_common as common,
            split_table_batched_embeddings_ops_training as original,
        )
except (ImportError, OSError) as error:  # a wheel for another torch ends at an undefined symbol
    pytest.skip(
        f"needs fbgemm_gpu (fbgemm-gpu-cpu 1.8.0 --no-deps, with torch): {error}",
        allow_module_level=True,
    )

NUM_ROWS, BATCH, MAX_IDS = (5, 9, 7), 6, 4
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # float32, sums in another order
HALF_TOLERANCE = {"rtol": 2e-3, "atol": 1e-3}  # float16 keeps 11 bits


def defect(why, *values):
    marks = pytest.mark.xfail(
        strict=True, raises=(AssertionError, RuntimeError), reason=f"fbgemm-gpu-cpu 1.8.0: {why}"
    )
    return pytest.param(*values, marks=marks, id=why)


def draw_weights(seed, dims):
    rng = np.random.default_rng(seed)
    return [
        rng.uniform(-1, 1, (rows, dim)).astype(np.float32)
        for rows, dim in zip(NUM_ROWS, dims, strict=True)
    ]


def ours(weights, **options):
    specs = [(*w.shape, rt.EmbeddingLocation.HOST, rt.ComputeDevice.CPU) for w in weights]
    module = rt.TableBatchedEmbeddingBags(specs, **options)
    module.load_state_dict(
        module.state_dict() | {f"table_{t}.weight": w for t, w in enumerate(weights)}
    )
    return module


def theirs(weights, **options):
    """The original with the same arguments: members of enums are found by name."""
    storages = {name: getattr(common, name, None) or getattr(original, name) for name in ENUMS}
    named = {
        k: storages[type(v).__name__][v.name] if type(v).__name__ in storages else v
        for k, v in options.items()
    }
    named["optimizer"] = original.OptimType[options.get("optimizer", rt.OptimType.EXACT_SGD).name]
    specs = [(*w.shape, common.EmbeddingLocation.HOST, original.ComputeDevice.CPU) for w in weights]
    module = original.SplitTableBatchedEmbeddingBagsCodegen(specs, **named)
    for table, w in zip(module.split_embedding_weights(), weights, strict=True):
        table.copy_(torch.from_numpy(w))
    return module


ENUMS = ("PoolingMode", "SparseType", "WeightDecayMode", "BoundsCheckMode")


def draw_batch(rng, features, *, weighted):
    """Bags of 0 to MAX_IDS ids with repeats; some are empty."""
    lengths = rng.integers(0, MAX_IDS + 1, len(features) * BATCH)
    table_of_id = np.repeat(np.repeat(features, BATCH), lengths)
    ids = (rng.random(lengths.sum()) * np.asarray(NUM_ROWS)[table_of_id]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return ids, offsets, rng.uniform(0.5, 2, ids.size).astype(np.float32) if weighted else None


def as_torch(batch):
    ids, offsets, weights = batch
    return [
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(offsets.astype(np.int64)),
        None if weights is None else torch.from_numpy(weights),
    ]


def compare_training(
    dims, *, features=(0, 1, 2), weighted=False, tolerance=TOLERANCE, num_steps=3, **options
):
    """Outputs, gradients of weights, tables and states agree over some steps."""
    weights = draw_weights(0, dims)
    options = {"feature_table_map": list(features), "learning_rate": 0.3, **options}
    module, peer = ours(weights, **options), theirs(weights, **options)
    rng = np.random.default_rng(1)
    for _ in range(num_steps):
        batch = draw_batch(rng, features, weighted=weighted)
        peer_batch = as_torch(batch)
        if weighted:
            peer_batch[2].requires_grad_(True)
        output, backward = module.vjp(*batch)
        peer_output = peer(*peer_batch)
        assert_allclose(output, peer_output.detach().numpy(), **tolerance)
        gradient = rng.normal(size=output.shape).astype(np.float32)
        d_weights = backward(jnp.asarray(gradient))
        peer_output.backward(torch.from_numpy(gradient))
        if weighted:
            assert_allclose(d_weights, peer_batch[2].grad.numpy(), **tolerance)
    for table, peer_table in zip(
        module.split_embedding_weights(), peer.split_embedding_weights(), strict=True
    ):
        assert_allclose(np.float32(table), peer_table.float().numpy(), **tolerance)
    for states, peer_states in zip(
        module.split_optimizer_states(), peer.split_optimizer_states(), strict=False
    ):
        for state, peer_state in zip(states, peer_states, strict=True):
            assert_allclose(state, peer_state.numpy().reshape(state.shape), **tolerance)


def test_lookups_with_another_batch_size_for_every_feature_and_rank():
    weights, sizes = draw_weights(6, (4, 8, 12)), [[1, 2], [2, 0], [3, 1]]
    rng = np.random.default_rng(7)
    offsets = np.arange(10, dtype=np.int32) * 2
    ids = rng.integers(0, min(NUM_ROWS), 18).astype(np.int32)
    options = {"optimizer": rt.OptimType.EXACT_ROWWISE_ADAGRAD}
    peer = theirs(weights, **options)(
        *as_torch((ids, offsets, None)), batch_size_per_feature_per_rank=sizes
    )
    found = ours(weights, **options)(
        ids, offsets, batch_size_per_feature_per_rank=tuple(map(tuple, sizes))
    )
    assert found.ndim == 1
    assert_allclose(found, peer.detach().numpy(), **TOLERANCE)


# Which the CPU build ignores.
HALF = {
    "weights_precision": rt.SparseType.FP16,
    "stochastic_rounding": False,
}


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighted": True},
        {"features": (0, 0, 1, 2, 2), "weighted": True},
        {"pooling_mode": rt.PoolingMode.MEAN},
        {"pooling_mode": rt.PoolingMode.NONE, "dims": (8, 8, 8)},
        {"gradient_clipping": True, "max_gradient": 0.4},
        HALF | {"tolerance": HALF_TOLERANCE},
    ],
    ids=str,
)
def test_training(optimizer, options):
    compare_training(**{"dims": (4, 8, 12), "optimizer": rt.OptimType[optimizer]} | options)


ROW_WISE = {"optimizer": rt.OptimType.EXACT_ROWWISE_ADAGRAD}
DECAY = ROW_WISE | {"weight_decay": 0.1}


@pytest.mark.parametrize(
    "options",
    [
        defect(
            "weighted means are not divided in the backward pass",
            {"pooling_mode": rt.PoolingMode.MEAN, "weighted": True},
        ),
        defect("weight_decay L2 is ignored", DECAY | {"weight_decay_mode": rt.WeightDecayMode.L2}),
        defect(
            "weight_decay DECOUPLE is ignored",
            DECAY | {"weight_decay_mode": rt.WeightDecayMode.DECOUPLE},
        ),
        defect("max_norm is ignored", ROW_WISE | {"max_norm": 0.5}),
        defect("tables out of order are refused", ROW_WISE | {"features": (1, 0, 2)}),
        defect(
            "two updates of one row",
            {"features": (0, 1, 0, 2), "optimizer": rt.OptimType.EXACT_ADAGRAD},
        ),
        defect(
            "sequences of tables out of order are refused",
            {"features": (1, 0, 2), "pooling_mode": rt.PoolingMode.NONE, "dims": (8, 8, 8)},
        ),
    ],
)
def test_training_that_the_original_gets_wrong(options):
    compare_training(**{"dims": (4, 8, 12)} | options)
