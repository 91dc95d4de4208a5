"""Random values in a fixed set of configurations, against loops in numpy float64."""

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import tbe as rt
from tests.tbe.oracle import Oracle, by_rank, make, side_by_side
from tests.tbe.row_formulas import FIRST_STEP, LR, MAX_COUNTER, VARIANTS

FP32, FP16, BF16 = rt.SparseType.FP32, rt.SparseType.FP16, rt.SparseType.BF16
SMOOTH = {"eps": 0.1}  # sums that cancel to a rounding error instead of zero must not be blown up
# Outputs and weights are rounded to these; a step may land on the neighbour of the oracle's number, twice.
TOLERANCE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Tables, features, bags and the optimizer; `batch` is one size or, by feature and rank, sizes."""

    specs: tuple[tuple[int, int], ...]
    features: tuple[int, ...]
    variant: str
    pooling: str = "sum"
    is_weighted: bool = False
    batch: Any = 3
    num_ids: int = 14
    id_dtype: type = np.int32
    weights_precision: rt.SparseType = FP32
    output_dtype: rt.SparseType = FP32
    is_cached: bool = False
    clamp: float = np.inf

    @property
    def bags_per_feature(self):
        return (
            [self.batch] * len(self.features)
            if isinstance(self.batch, int)
            else [sum(own) for own in self.batch]
        )

    @property
    def dims(self):
        return [self.specs[t][1] for t in self.features]

    def arguments(self):
        return VARIANTS[self.variant][1] | (SMOOTH if self.variant not in ("sgd", "lars") else {})

    def module(self):
        caching = (
            {"location": rt.EmbeddingLocation.MANAGED_CACHING, "cache_sets": 1}
            if self.is_cached
            else {}
        )
        clipping = (
            {"gradient_clipping": True, "max_gradient": self.clamp}
            if np.isfinite(self.clamp)
            else {}
        )
        module = make(
            self.specs,
            uniform=None,
            feature_table_map=list(self.features),
            optimizer=VARIANTS[self.variant][0],
            learning_rate=9.0,
            pooling_mode=rt.PoolingMode[self.pooling.upper()],
            weights_precision=self.weights_precision,
            output_dtype=self.output_dtype,
            stochastic_rounding=False,
            **caching,
            **clipping,
            **self.arguments(),
        )
        # Drawn in numpy: random numbers would be compiled for every shape.
        drawn = [
            np.random.default_rng(table).uniform(-1, 1, shape)
            for table, shape in enumerate(self.specs)
        ]
        # The ratio of norms jumps at a row of zeros, where a rounding error of the gradient decides.
        if not {"lamb", "partial_lamb", "lars"} & {self.variant}:
            for values in drawn:
                values[:1] = 0.0
        weights = {
            f"table_{table}.weight": values.astype(np.float32) for table, values in enumerate(drawn)
        }
        numbers = {"max_counter": np.float32(MAX_COUNTER), "step": np.int32(FIRST_STEP)}
        module.load_state_dict(module.state_dict() | weights | numbers)
        module.set_learning_rate(LR)
        return module


C = Configuration
CONFIGURATIONS = {
    "shared_tables_in_any_order": C(
        ((5, 4), (7, 4), (3, 8)), (1, 2, 0, 1), "sgd", id_dtype=np.int64
    ),
    "mean_of_weighted_odd_dims": C(
        ((4, 3), (9, 1), (2, 13)), (2, 0, 1, 0), "rowwise_l2", "mean", True
    ),
    "single_rows_of_mixed_dims": C(
        ((5, 4), (8, 6)), (1, 0, 1), "adagrad", "none", num_ids=9, clamp=0.5
    ),
    "variable_batch": C(
        ((6, 4), (5, 8)), (0, 1), "adamw", is_weighted=True, batch=((1, 2, 0), (2, 0, 1))
    ),
    "variable_batch_cached": C(
        ((6, 3), (5, 3)),
        (1, 0, 1),
        "rowwise_decouple",
        "mean",
        batch=((1, 2), (2, 0), (0, 0)),
        is_cached=True,
    ),
    "no_bags": C(((6, 4),), (0,), "adagrad", batch=0, num_ids=0),
    "no_ids": C(((6, 4), (5, 4)), (1, 0), "rowwise", "mean", is_weighted=True, num_ids=0),
    "global_decay": C(((4, 4), (5, 2)), (0, 1, 0), "global", is_weighted=True, num_ids=5),
    "global_decay_of_single_rows": C(((4, 4),), (0,), "global", "none", num_ids=4),
    "float16": C(
        ((5, 4), (5, 4)),
        (1, 0),
        "rowwise",
        is_weighted=True,
        weights_precision=FP16,
        output_dtype=FP16,
    ),
    "bfloat16": C(
        ((5, 4),), (0,), "rowwise_decouple", "mean", weights_precision=BF16, output_dtype=BF16
    ),
    "lamb": C(((5, 4), (5, 3)), (0, 1), "lamb", "mean", True),
    "lars": C(((5, 4),), (0, 0), "lars", id_dtype=np.int64),
    "partial_adam": C(((5, 4), (5, 3)), (1, 0), "partial_adam", is_weighted=True, clamp=0.75),
    "partial_lamb": C(((5, 4),), (0, 0, 0), "partial_lamb", "mean"),
    "counter": C(((5, 4), (6, 4)), (0, 1), "counter_l2", "mean", True),
    "cowclip": C(((5, 4), (6, 3)), (1, 0), "cowclip"),
    "max_norm": C(((5, 4),), (0, 0), "rowwise_max_norm", is_weighted=True),
    "narrow_and_wide": C(((6, 1), (6, 2050)), (0, 1), "adamw"),
}
USED = {c.variant for c in CONFIGURATIONS.values()}
CONFIGURATIONS |= {name: C(((6, 4),), (0,), name) for name in VARIANTS if name not in USED}


@st.composite
def batches(draw, c):
    """Ids (with -1 among them), offsets, weights and a gradient per bag, all of fixed sizes."""
    num_bags = sum(c.bags_per_feature)
    cuts = draw(
        st.lists(
            st.integers(0, c.num_ids), min_size=max(num_bags - 1, 0), max_size=max(num_bags - 1, 0)
        )
    )
    offsets = np.array([0, *sorted(cuts), c.num_ids][: num_bags + 1], c.id_dtype)
    raw = draw(st.lists(st.integers(0, 10**6), min_size=c.num_ids, max_size=c.num_ids))
    ends = offsets[np.cumsum(c.bags_per_feature)] if num_bags else np.zeros(len(c.features), int)
    rows = [
        c.specs[c.features[int(np.searchsorted(ends, p, side="right"))]][0]
        for p in range(c.num_ids)
    ]
    ids = np.array([r % (n + 1) - 1 for r, n in zip(raw, rows, strict=True)], c.id_dtype).reshape(
        -1
    )
    eighths = st.integers(-16, 16).map(lambda x: x / 8)
    scale = draw(st.lists(eighths, min_size=c.num_ids + num_bags, max_size=c.num_ids + num_bags))
    weights = np.array(scale[: c.num_ids], np.float32) if c.is_weighted else None
    bag_dims = [
        dim for dim, count in zip(c.dims, c.bags_per_feature, strict=True) for _ in range(count)
    ]
    if c.pooling == "none":
        d_bags = np.outer(scale[: c.num_ids], 1 + np.arange(max(c.dims)))
    else:
        d_bags = [
            s + np.arange(dim) / 4 for s, dim in zip(scale[c.num_ids :], bag_dims, strict=True)
        ]
    return ids, offsets, weights, d_bags


@pytest.mark.slow_rows(
    "counter_sgd",
    "counter_sgd_tail",
    "counter_decrease",
    "counter_adagradw_increase",
    "counter_decouple",
    "counter_adagradw",
    "cowclip_l2",
    "cowclip_decouple",
    "partial_lamb",
    "bfloat16",
    "variable_batch",
    "single_rows_of_mixed_dims",
    "global_bounded_starting_late",
    "counter_adagradw_bounded",
    "lars",
    "adam",
    "emainplace",
    "cowclip",
    "ensemble",
    "global_decay_of_single_rows",
    "max_norm",
    "lamb",
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
@hypothesis.settings(
    max_examples=3, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(st.data())
def test_training_agrees_with_loops_over_bags_and_ids(name, data):
    c = CONFIGURATIONS[name]
    module = c.module()
    dtype = {FP32: np.float32, FP16: np.float16, BF16: module.split_embedding_weights()[0].dtype}[
        c.weights_precision
    ]
    formula = VARIANTS[c.variant][2]
    oracle = Oracle(
        module, c.features, c.pooling, formula, c.arguments(), dtype=dtype, clamp=c.clamp
    )
    sizes = None if isinstance(c.batch, int) else c.batch

    def shaped(rows):
        if c.pooling == "none":
            return np.asarray(rows, np.float64)
        return side_by_side(rows, c.dims) if sizes is None else by_rank(rows, sizes)

    tolerance = TOLERANCE[c.weights_precision]
    close = {"rtol": max(tolerance, TOLERANCE[c.output_dtype]), "atol": 4 * tolerance}
    for number in (0, 1, 4):  # not every step is one of the module
        oracle.t = FIRST_STEP + number + 1
        module.set_optimizer_step(FIRST_STEP + number)
        ids, offsets, weights, d_bags = data.draw(batches(c))
        d_bags[:1] = [0.0 * row for row in d_bags[:1]]  # rows that are touched without a gradient
        given = {"batch_size_per_feature_per_rank": sizes}
        looked_up = module(ids, offsets, weights, **given)
        output, backward = module.vjp(ids, offsets, weights, **given)
        assert_array_equal(looked_up, output)
        wanted = shaped(oracle.pooled(ids, offsets, weights, c.bags_per_feature))
        assert output.shape == wanted.shape and output.dtype == module.output_dtype
        assert_allclose(np.asarray(output, np.float64), wanted, **close)
        found = backward(shaped(d_bags).astype(np.float32))
        wanted = oracle.backward(ids, offsets, weights, c.bags_per_feature, d_bags)
        if weights is None:
            assert found is None
        else:
            assert_allclose(found, wanted, **close)
        oracle.assert_agrees(module, rtol=tolerance, atol=4 * tolerance)
