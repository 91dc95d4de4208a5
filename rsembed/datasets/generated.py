"""Generated data: ids with a Zipf distribution, and click logs with a known best loss."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from jaxtyping import Float32, Float64, Int32

from rsembed.checks import NonNegativeInt, PositiveInt, validated

CLICK_INTERCEPT = -1.0
"""Constant term of the log-odds of a click.

The intercept and the standard deviations `CLICK_DENSE_STD`, `CLICK_BIAS_STD` and
`CLICK_INTERACTION_STD` of the other terms are chosen so that a model can learn to predict clicks,
but not with certainty.
"""
CLICK_DENSE_STD = 0.6
CLICK_BIAS_STD = 0.8
CLICK_INTERACTION_STD = 0.8


@validated
def zipf_probabilities(
    vocabulary_size: Annotated[int, "[1, 2147483648)"],
    *,
    exponent: Annotated[float, "[0, inf)"] = 1.15,
) -> Float64[np.ndarray, " vocab"]:
    """Probabilities of the bounded Zipf law: rank `r = 1, 2, …` has probability `r**-exponent / sum`.

    Args:
      vocabulary_size: number of ranks.
      exponent: exponent of the law, 0 (uniform) or more. Exponents of 1.05 to 1.2 are usual for
        click logs and words. A larger exponent concentrates the lookups on fewer ids.

    Raises: ValueError: `vocabulary_size` is below 1 or beyond int32, or `exponent` is negative or
      not finite.

    Example:
      >>> zipf_probabilities(3, exponent=1.0).round(3).tolist()
      [0.545, 0.273, 0.182]
    """
    weights = np.arange(1, vocabulary_size + 1, dtype=np.float64) ** -float(exponent)
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


@validated
def zipf_ids(
    num_ids: NonNegativeInt,
    vocabulary_size: int,
    *,
    exponent: float = 1.15,
    seed: NonNegativeInt,
    shuffle: bool = True,
) -> Int32[np.ndarray, " ids"]:
    """Ids drawn from the bounded Zipf law, by exact inversion of its distribution function.

    Args:
      num_ids: number of ids to draw. 0 is allowed.
      vocabulary_size: exclusive upper bound of the ids. A `vocabulary_size` of ten million needs
        about 0.2 GB of memory.
      exponent: Zipf exponent, see `zipf_probabilities`.
      seed: seed of the draws and of the shuffle. The shuffle depends on `seed` and
        `vocabulary_size`, but not on `num_ids`.
      shuffle: whether popular ids are spread over the whole range, as with hashed ids, True by
        default. If False, id 0 is the most frequent id, then id 1, and so on.

    Raises: ValueError: `num_ids` is negative, or another argument is out of range (see
      `zipf_probabilities`).

    Example:
      >>> ids = zipf_ids(1000, 10, exponent=1.0, seed=0, shuffle=False)
      >>> int(np.bincount(ids).argmax()), ids.dtype
      (0, dtype('int32'))
    """
    generator = _generator("zipf ranks", seed)
    ranks = _zipf_ranks(generator, num_ids, vocabulary_size, exponent)
    if not shuffle:
        return ranks
    return id_of_rank(vocabulary_size, seed)[ranks]


def _generator(purpose: str, *seeds: int) -> np.random.Generator:
    """A random generator for `purpose`, independent of the generators for other purposes."""
    purpose_number = zlib.crc32(purpose.encode())
    return np.random.Generator(np.random.PCG64([purpose_number, *seeds]))


def id_of_rank(vocabulary_size: int, *seeds: int) -> np.ndarray:
    """The id of each popularity rank: a random permutation, the same for equal arguments."""
    generator = _generator("zipf shuffle", *seeds)
    return generator.permutation(vocabulary_size).astype(np.int32)


def _zipf_ranks(
    generator: np.random.Generator, count: int, vocabulary_size: int, exponent: float
) -> np.ndarray:
    """Random ranks, from 0, that follow a Zipf law."""
    distribution = np.cumsum(zipf_probabilities(vocabulary_size, exponent=exponent))
    # After the division, `distribution[-1]` is exactly 1, and every number from `generator.random`
    # is smaller than 1.
    distribution /= distribution[-1]
    draws = generator.random(count)
    ranks = np.searchsorted(distribution, draws, side="right")
    return ranks.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ClickLog:
    """Samples of a click log, with the true probability of each click.

    `best_log_loss` is the expected log-loss, in nats, of a model that predicts `click_probability`,
    which is the lowest expected log-loss that a model can have. `base_rate_log_loss` is the
    log-loss of a model that always predicts the mean probability. The loss on the drawn `labels`
    differs from the expected loss by about `1 / sqrt(samples)`.
    """

    sparse: dict[str, Int32[np.ndarray, " samples"]]
    dense: Float32[np.ndarray, "samples numbers"]
    labels: Int32[np.ndarray, " samples"]
    click_probability: Float64[np.ndarray, " samples"]
    best_log_loss: float
    base_rate_log_loss: float

    def __repr__(self) -> str:
        return (
            f"ClickLog({len(self.labels):,} samples with {len(self.sparse)} ids and "
            f"{self.dense.shape[1]} numbers; best log-loss {self.best_log_loss:.4f})"
        )


@validated
def synthetic_clicks(
    num_samples: PositiveInt,
    *,
    vocabulary_sizes: Sequence[int] = (1000, 300, 100),
    num_dense: NonNegativeInt = 4,
    seed: NonNegativeInt,
    sample_seed: NonNegativeInt = 0,
    exponent: float = 1.05,
    embedding_dim: PositiveInt = 4,
) -> ClickLog:
    """A click log with Zipf ids, and with labels from a factorisation machine, the true model.

    The log-odds are `intercept + w·dense + sum_f b_f[id_f] + sum_{f<g} <v_f[id_f], v_g[id_g]>`,
    with dense weights `w`, and a bias `b` and a vector `v` for each id. Labels are Bernoulli draws.

    Args:
      num_samples: number of rows. A few hundred rows are enough for tests. With 100_000 rows, a
        trained model comes close to `best_log_loss`.
      vocabulary_sizes: number of ids of each sparse feature. The features are called `sparse_0`,
        `sparse_1`, ….
      num_dense: number of standard normal dense features. 0 is allowed.
      seed: seed of the true model and of the popularity of ids, which do not depend on
        `num_samples`.
      sample_seed: seed of the rows. To draw a test set, change only `sample_seed`.
      exponent: Zipf exponent of the ids, see `zipf_probabilities`.
      embedding_dim: length of the vectors `v` in the true model. To fit the true model, a trained
        model needs an embedding dimension of at least `embedding_dim`.

    Raises: ValueError: `num_dense` is negative, another number is below 1, or `exponent` is
      negative or not finite.

    Source: Model: Rendle, "Factorization Machines", ICDM 2010, equation 1.

    Example:
      >>> clicks = synthetic_clicks(500, seed=0)
      >>> sorted(clicks.sparse), clicks.dense.shape, clicks.best_log_loss < clicks.base_rate_log_loss
      (['sparse_0', 'sparse_1', 'sparse_2'], (500, 4), True)
    """
    if not vocabulary_sizes:
        raise ValueError(
            "synthetic_clicks: vocabulary_sizes needs the size of one feature at least."
        )
    rows = _generator("click rows", seed, sample_seed)
    dense = rows.standard_normal((num_samples, num_dense)).astype(np.float32)
    weights = _generator("click weights", seed).standard_normal(num_dense)
    weights = weights / math.sqrt(max(1, num_dense))
    log_odds = CLICK_INTERCEPT + CLICK_DENSE_STD * (dense.astype(np.float64) @ weights)

    sparse = {}
    num_features = len(vocabulary_sizes)
    vector_sum = np.zeros((num_samples, embedding_dim))
    square_sum = np.zeros((num_samples, embedding_dim))
    for feature, vocabulary_size in enumerate(vocabulary_sizes):
        ranks = _zipf_ranks(rows, num_samples, vocabulary_size, exponent)
        ids = id_of_rank(vocabulary_size, seed, feature)[ranks]
        # Column 0 has the bias of each id, and the other columns have the vector of each id.
        shape = (vocabulary_size, 1 + embedding_dim)
        truth = _generator("click ids", seed, feature).standard_normal(shape)
        log_odds += CLICK_BIAS_STD / math.sqrt(num_features) * truth[ids, 0]
        vector_sum += truth[ids, 1:]
        square_sum += truth[ids, 1:] ** 2
        sparse[f"sparse_{feature}"] = ids
    num_pairs = max(1, num_features * (num_features - 1) // 2)
    # The sum of `<v_f, v_g>` over pairs f < g is `(|sum of vectors|² - sum of |vector|²) / 2`.
    pairs = 0.5 * np.sum(vector_sum**2 - square_sum, axis=1)
    log_odds += CLICK_INTERACTION_STD / math.sqrt(embedding_dim * num_pairs) * pairs

    probability = 1.0 / (1.0 + np.exp(-log_odds))
    rate = float(np.mean(probability))
    return ClickLog(
        sparse=sparse,
        dense=dense,
        labels=(rows.random(num_samples) < probability).astype(np.int32),
        click_probability=probability,
        best_log_loss=float(np.mean(np.logaddexp(0.0, log_odds) - probability * log_odds)),
        base_rate_log_loss=-rate * math.log(rate) - (1.0 - rate) * math.log1p(-rate),
    )
