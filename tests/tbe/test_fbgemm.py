"""The module gives the same numbers as FBGEMM, if `fbgemm_gpu` can be imported.

`test_cases.py` has numbers that FBGEMM printed, and needs no installation. This file tests more
combinations. Defects of FBGEMM's CPU build are marked with `defect`: such a case must fail, so that
a repaired build is noticed.
"""

import enum
import warnings

import numpy as np
import pytest
from numpy.testing import assert_allclose

from rsembed import tbe as rt
from tests.tbe.oracle import make

try:
    # Warnings of these imports are not caused by this library.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The import of fbgemm_gpu needs the libraries of torch.
        import torch  # isort: skip
        from fbgemm_gpu import (
            split_table_batched_embeddings_ops_common as common,
            split_table_batched_embeddings_ops_training as original,
        )
# A wheel for another version of torch fails with an OSError, because a symbol is undefined.
except (ImportError, OSError) as error:
    pytest.skip(
        f"needs fbgemm_gpu (fbgemm-gpu-cpu 1.8.0 --no-deps, with torch): {error}",
        allow_module_level=True,
    )

NUM_ROWS = (5, 9, 7)
BAGS = 6
# Tolerance of float32 sums in another order.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
# float16 has 11 significant bits.
HALF_TOLERANCE = {"rtol": 2e-3, "atol": 1e-3}
ROWWISE = rt.OptimType.EXACT_ROWWISE_ADAGRAD


def defect(why, *values):
    marks = pytest.mark.xfail(
        strict=True, raises=(AssertionError, RuntimeError), reason=f"fbgemm-gpu-cpu 1.8.0: {why}"
    )
    return pytest.param(*values, marks=marks, id=why)


def member_of_original(value):
    """FBGEMM's enum member of the same name, or the value itself if it is no enum member."""
    if isinstance(value, rt.OptimType):
        return original.OptimType[value.name]
    if isinstance(value, enum.Enum):
        kind = type(value).__name__
        return getattr(common, kind, getattr(original, kind, None))[value.name]
    return value


def both(dims, **options):
    """The module, and FBGEMM's module with the same weights and arguments."""
    specs = list(zip(NUM_ROWS, dims, strict=True))
    module = make(specs, location=rt.EmbeddingLocation.HOST, **options)
    peer = original.SplitTableBatchedEmbeddingBagsCodegen(
        [(*spec, common.EmbeddingLocation.HOST, original.ComputeDevice.CPU) for spec in specs],
        **{name: member_of_original(value) for name, value in options.items()},
    )
    for table, weights in zip(
        peer.split_embedding_weights(), module.split_embedding_weights(), strict=True
    ):
        table.copy_(torch.from_numpy(np.array(weights)))
    return module, peer


def as_torch(ids, offsets, weights=None):
    if weights is not None:
        weights = torch.from_numpy(weights).requires_grad_(True)
    return torch.from_numpy(ids), torch.from_numpy(offsets), weights


def compare_training(
    *, dims=(4, 8, 12), features=(0, 1, 2), weighted=False, tolerance=TOLERANCE, **options
):
    """Asserts equal outputs, gradients of weights, tables and states over three steps."""
    options = {"optimizer": rt.OptimType.EXACT_SGD, "learning_rate": 0.3, **options}
    module, peer = both(dims, feature_table_map=list(features), **options)
    rng = np.random.default_rng(1)
    for _ in range(3):
        lengths = rng.integers(0, 5, len(features) * BAGS)
        num_rows = np.repeat(np.repeat(np.asarray(NUM_ROWS)[list(features)], BAGS), lengths)
        batch = [rng.integers(0, num_rows), np.array([0, *np.cumsum(lengths)])]
        if weighted:
            batch.append(rng.uniform(0.5, 2, lengths.sum()).astype(np.float32))
        peer_batch = as_torch(*batch)
        output, backward = module.vjp(*batch)
        peer_output = peer(*peer_batch)
        assert_allclose(output, peer_output.detach().numpy(), **tolerance)
        gradient = rng.normal(size=output.shape).astype(np.float32)
        d_weights = backward(gradient)
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
    module, peer = both((4, 8, 12), optimizer=ROWWISE)
    sizes = [[1, 2], [2, 0], [3, 1]]
    batch = np.random.default_rng(7).integers(0, 5, 18), np.arange(0, 19, 2)
    output = module(*batch, batch_size_per_feature_per_rank=sizes)
    expected = peer(*as_torch(*batch), batch_size_per_feature_per_rank=sizes)
    assert output.ndim == 1
    assert_allclose(output, expected.detach().numpy(), **TOLERANCE)


HALF = {
    "weights_precision": rt.SparseType.FP16,
    # The CPU build ignores this argument.
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
    compare_training(optimizer=rt.OptimType[optimizer], **options)


ROW_WISE = {"optimizer": ROWWISE}
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
    compare_training(**options)
