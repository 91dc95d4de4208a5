"""Random values in a fixed set of configurations, compared with loops in numpy float64."""

from typing import NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.tbe.oracle import CACHED, Oracle, make, variant
from tests.tbe.row_formulas import FIRST_STEP, MAX_COUNTER, VARIANTS

# Tolerance of outputs and weights by dtype. Each of two roundings can give a neighbouring number.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
NUM_BAGS = 3
NO_OPTIONS = {}


class Configuration(NamedTuple):
    """Tables, features, row formula, batch, and other arguments of the module.

    `sizes` are numbers of bags by feature and rank. By default, each feature has three bags.
    """

    specs: tuple
    features: tuple
    variant: str
    pooling: str = "SUM"
    is_weighted: bool = False
    sizes: tuple | None = None
    num_ids: int = 14
    id_dtype: type = np.int32
    options: dict = NO_OPTIONS

    def module(self):
        module = make(
            self.specs,
            feature_table_map=self.features,
            pooling_mode=self.pooling,
            stochastic_rounding=False,
            **variant(self.variant),
            **self.options,
        )
        saved = module.state_dict()
        # For a row of 0, a rounding error of the gradient would decide the ratio of norms of these
        # rules.
        if self.variant not in ("lamb", "partial_lamb", "lars"):
            for table in range(len(self.specs)):
                saved[f"table_{table}.weight"][0] = 0.0
        numbers = {"max_counter": np.float32(MAX_COUNTER), "step": np.int32(FIRST_STEP)}
        module.load_state_dict(saved | numbers)
        return module

    def draw_batch(self, rng):
        """Ids, some of them -1, offsets and weights."""
        bags_per_feature = [NUM_BAGS] * len(self.features)
        if self.sizes is not None:
            bags_per_feature = np.sum(self.sizes, axis=1)
        cuts = rng.integers(0, self.num_ids + 1, sum(bags_per_feature) - 1)
        offsets = np.array([0, *np.sort(cuts), self.num_ids], self.id_dtype)
        rows = [self.specs[table][0] for table in self.features]
        ids = rng.integers(-1, np.repeat(np.repeat(rows, bags_per_feature), np.diff(offsets)))
        weights = None
        if self.is_weighted:
            weights = eighths(rng, self.num_ids)
        return ids.astype(self.id_dtype), offsets, weights


def eighths(rng, shape):
    return (rng.integers(-16, 17, shape) / 8).astype(np.float32)


C = Configuration
BFLOAT16 = {"weights_precision": "BF16", "output_dtype": "BF16"}
FLOAT16 = {"weights_precision": "FP16", "output_dtype": "FP16"}
CONFIGURATIONS = {
    "shared_tables_in_any_order": C(
        ((5, 4), (7, 4), (3, 8)), (1, 2, 0, 1), "sgd", id_dtype=np.int64
    ),
    "mean_of_weighted_odd_dims": C(
        ((4, 3), (9, 1), (2, 13)), (2, 0, 1, 0), "rowwise_l2", "MEAN", True
    ),
    "single_rows_of_mixed_dims": C(
        ((5, 4), (8, 6)),
        (1, 0, 1),
        "adagrad",
        "NONE",
        options={"gradient_clipping": True, "max_gradient": 0.5},
    ),
    "variable_batch": C(
        ((6, 4), (5, 8)), (0, 1), "adamw", is_weighted=True, sizes=((1, 2, 0), (2, 0, 1))
    ),
    "variable_batch_cached": C(
        ((6, 3), (5, 3)),
        (1, 0, 1),
        "rowwise_decouple",
        "MEAN",
        sizes=((1, 2), (2, 0), (0, 0)),
        options={"location": CACHED, "cache_sets": 1},
    ),
    "global_decay": C(((4, 4), (5, 2)), (0, 1, 0), "global", is_weighted=True, num_ids=5),
    "global_decay_of_single_rows": C(((4, 4),), (0,), "global", "NONE", num_ids=4),
    "float16": C(((5, 4), (5, 4)), (1, 0), "rowwise", is_weighted=True, options=FLOAT16),
    "bfloat16": C(((5, 4),), (0,), "rowwise_decouple", "MEAN", options=BFLOAT16),
    "partial_adam": C(
        ((5, 4), (5, 3)),
        (1, 0),
        "partial_adam",
        is_weighted=True,
        options={"gradient_clipping": True, "max_gradient": 0.75},
    ),
    "narrow_and_wide": C(((6, 1), (6, 2050)), (0, 1), "adamw"),
}
USED = {c.variant for c in CONFIGURATIONS.values()}
CONFIGURATIONS |= {name: C(((6, 4),), (0,), name) for name in VARIANTS if name not in USED}


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
    "counter_adagradw_bounded",
    "lars",
    "adam",
    "emainplace",
    "cowclip",
    "ensemble",
    "global_decay_of_single_rows",
    "rowwise_max_norm",
    "lamb",
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_agrees_with_loops_over_bags_and_ids(name):
    c = CONFIGURATIONS[name]
    rng = np.random.default_rng(0)
    module = c.module()
    oracle = Oracle(
        module,
        c.variant,
        c.features,
        c.pooling,
        sizes=c.sizes,
        clamp=c.options.get("max_gradient", np.inf),
    )
    tolerance = TOLERANCE[oracle.dtype.name]
    close = {"rtol": tolerance, "atol": 4 * tolerance}
    # Steps can be skipped with `set_optimizer_step`.
    for late in (0, 1, 4, 5, 6):
        step = FIRST_STEP + late
        oracle.t = step + 1
        module.set_optimizer_step(step)
        batch = c.draw_batch(rng)
        looked_up = module(*batch, batch_size_per_feature_per_rank=c.sizes)
        output, backward = module.vjp(*batch, batch_size_per_feature_per_rank=c.sizes)
        assert_array_equal(looked_up, output)
        assert output.dtype == module.output_dtype
        assert_allclose(np.asarray(output, np.float64), oracle.lookup(*batch), **close)
        gradient = eighths(rng, output.shape)
        # Some gradients are 0, so rows can be touched without a change.
        gradient.reshape(-1)[: c.specs[c.features[0]][1]] = 0.0
        d_weights = backward(gradient)
        expected = oracle.backward(*batch, gradient)
        if c.is_weighted:
            assert_allclose(d_weights, expected, **close)
        else:
            assert d_weights is None
        oracle.assert_agrees(module, **close)
