"""`TTEmbeddingBag` and `TableBatchedTTEmbeddingBag`: drop-ins for embedding bags whose tables are tensor trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rsembed.checks import did_you_mean
from rsembed.tt.spec import TTSpec
from rsembed.tt.tables import TTTables

AFTER_SIZES = (
    *("tt_ranks", "tt_p_shapes", "tt_q_shapes", "optimizer", "learning_rate", "eps", "sparse", "use_cache"),
    *("cache_size", "hashtbl_size", "weight_dist", "enforce_embedding_dim"),
)
"""Published arguments by position, behind the sizes of the table."""


class TTEmbeddingBag(TTTables):
    """An embedding bag over a table of `num_embeddings` rows that is never stored, only its tensor-train cores.

    Args:
      num_embeddings: rows.
      embedding_dim: any length of row.
      published: by position, as published: `tt_ranks, tt_p_shapes, tt_q_shapes, optimizer, learning_rate, eps, sparse,
        use_cache, cache_size, hashtbl_size, weight_dist, enforce_embedding_dim`; without those given by keyword before
        them, as in `TTEmbeddingBag(10, 3, None, None, tt_ranks=[2, 2])`.
      tt_ranks: one per boundary between cores, so `d - 1` of them make `d` cores.
      tt_p_shapes: row factors, of product at least `num_embeddings`; None takes `suggested_tt_shapes`.
      tt_q_shapes: column factors, of product `embedding_dim`; None takes `suggested_tt_shapes` without rounding up.
      sparse: True steps the cores in `backward` (see `vjp`) with `optimizer` and hides them from `nnx.grad`; False
        makes them `nnx.Param`s that any optax rule trains.
      optimizer: of the fused step: SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD (one state per core slice) or ADAM.
      learning_rate: of the fused step.
      eps: added to the denominator, both Adagrads only.
      weight_dist: see `init_cores`.
      dtype: of the cores, float32 or bfloat16. Rows and sums are float32.
      mode: "sum" or "mean", which divides by the number of ids.
      padding_idx: an id that contributes nothing and is not counted.
      bounds_check: "raise" refuses ids outside the table, except -1 for "no id"; "ignore" drops them with a warning.
        Inside `jit` they are always dropped.
      include_last_offset: see `__call__`; must be said under `jit`.
      enforce_embedding_dim: accepted; the dimension is always enforced.
      max_norm: not supported, as renormalised rows would have to be written back.
      scale_grad_by_freq: not supported.
      implementation: see `cores.pooled_rows`.
      use_cache: keep the most read rows uncompressed and train them by themselves, from the first `cache_populate` on.
        True here and False for many tables, as published.
      cache_size: rows kept, per group of tables of equal column factors and ranks; 0 takes a thousandth.
      hashtbl_size: ids counted at most; 0, or less than six per cached row, takes 16.
      rngs: its stream `params` draws the cores; None means `nnx.Rngs(0)`, as the published calls pass none.

    Raises:
      ValueError: shapes do not fit, or an option is unknown.
      NotImplementedError: the optimizer or option is not offered.

    Source: FBTT-Embedding, `TTEmbeddingBag`.

    Example:
      >>> import jax.numpy as jnp
      >>> embedding_sum = TTEmbeddingBag(10, 3, None, None, tt_ranks=[2, 2], sparse=False)
      >>> embedding_sum(jnp.asarray([1, 2, 4, 5, 4, 3, 2, 9]), jnp.asarray([0, 4])).shape
      (2, 3)
    """

    is_single = True

    def __init__(self, num_embeddings: int, embedding_dim: int, *published: object, **options: Any):
        given = {"use_cache": True} | by_name(published, options)
        super().__init__(1, num_embeddings, embedding_dim, **given)

    @property
    def spec(self) -> TTSpec:
        """Rows, factors and ranks."""
        return self.specs[0]


class TableBatchedTTEmbeddingBag(TTTables):
    """Embedding bags over several tables; tables with equal column factors and ranks share one lookup.

    Sizes, dimensions, ranks and factors are those of all tables, or sequences of one per table.

    Args:
      num_tables: number of tables.
      num_embeddings: rows.
      embedding_dim: length of a row.
      published: by position, as for `TTEmbeddingBag`.
      tt_ranks: ranks, or one sequence of ranks per table.
      tt_p_shapes: row factors or None, or one of these per table.
      tt_q_shapes: column factors or None, or one of these per table.
      enforce_embedding_dim: accepted; the dimension is always enforced.
      options: those of `TTEmbeddingBag`.

    Raises: as `TTEmbeddingBag`; ValueError: a sequence has not one entry per table.

    Source: FBTT-Embedding, `TableBatchedTTEmbeddingBag`.

    Example:
      >>> import jax.numpy as jnp
      >>> tables = TableBatchedTTEmbeddingBag(2, [10, 600], 4, tt_ranks=[2], sparse=False)
      >>> tables(jnp.asarray([[1, 2], [3, -1], [599, 0], [7, 7]])).shape  # two bags a table
      (2, 2, 4)
    """

    is_single = False

    def __init__(
        self,
        num_tables: int,
        num_embeddings: int | Sequence[int],
        embedding_dim: int | Sequence[int],
        *published: object,
        **options: Any,
    ):
        super().__init__(num_tables, num_embeddings, embedding_dim, **by_name(published, options))


def by_name(published: Sequence[object], options: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, of which those in `AFTER_SIZES` may be given by position.

    Raises: TypeError: one is given twice or unknown, there are too many, or ranks are missing.
    """
    options = {name: value for name, value in options.items() if value is not None or name not in AFTER_SIZES[:3]}
    places = [name for name in AFTER_SIZES if name != "tt_ranks" or name not in options]
    if len(published) > len(places):
        raise TypeError(f"too many arguments by position: {len(published)} for {', '.join(places)}.")
    given = {name: value for name, value in zip(places, published, strict=False) if value is not None}
    if twice := [name for name in given if name in options]:
        raise TypeError(f"{twice[0]} is given by position and by keyword.")
    known = [*inspect.signature(TTTables.__init__).parameters][4:]  # behind self and the sizes
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"there is no argument {unknown[0]!r}{did_you_mean(unknown[0], known)}.")
    if "tt_ranks" not in given | options:
        raise TypeError(
            "tt_ranks is missing: one rank per boundary between cores, such as tt_ranks=[16] for two cores."
        )
    return given | options
