"""`TTEmbeddingBag`: a drop-in for an embedding bag whose table is a tensor train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Array, Float

from rsembed.checks import did_you_mean, validated
from rsembed.tt.spec import TTSpec
from rsembed.tt.tables import TTGradients, TTTables


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
      implementation: see `chain.pooled_rows`.
      use_cache: keep the most read rows uncompressed and train them by themselves, from the first `cache_populate` on.
        True here and False for many tables, as published.
      cache_size: rows kept at most, per group of tables of equal column factors and ranks; 0 takes a thousandth.
      hashtbl_size: ids counted at most; 0, or less than six per cached row, takes 16. See `read_counts.ReadCounts` for
        what is approximated once they are full.
      max_spilled_rows: bound of the trained rows that left the cache and are still served as they are; when they are
        full, trained rows stay in the cache, which is logged. None keeps them all, and logs when they take more than
        three times the cache. With `sparse=False`, where an optimizer outside knows the array of rows by its shape,
        room for them is made at once: None makes it three times the cache.
      populate_every: populate before every so many counted lookups; 0 leaves it to you. Not with lookups inside `jit`,
        which are not counted.
      halve_counts_every: halve all counts after every so many populates, so that the cache follows a drifting stream.
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

    @validated
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *published: Any,
        tt_ranks: Sequence[int] | None = None,
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
        enforce_embedding_dim: bool = True,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        **options: Any,
    ):
        del enforce_embedding_dim  # it always is
        for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
            if value:
                raise NotImplementedError(f"{name}={value!r} is not offered: no row is stored that it could change.")
        shapes, options = by_name(published, (tt_ranks, tt_p_shapes, tt_q_shapes), options)
        super().__init__([TTSpec.suggest(num_embeddings, embedding_dim, *shapes)], **{"use_cache": True, **options})

    @property
    def spec(self) -> TTSpec:
        """Rows, factors and ranks."""
        return self.specs[0]

    def full_weight(self) -> Float[Array, "vocab dim"]:
        """The whole table, padding rows left out."""
        return self.table_weight(0)

    def __call__(
        self, indices: Any, offsets: Any = None, per_sample_weights: Any = None, warmup: bool = True
    ) -> Float[Array, "batch dim"]:
        """Pooled rows of every bag; an empty bag gives zeros.

        Args:
          indices: flat ids; or a dense array `[batch, ids per bag]`, -1 for no id; or `Bags`; or lists of ids.
          offsets: start of each bag of flat ids. A last entry equal to the number of ids is taken for the end of the
            last bag unless `include_last_offset=False` says that an empty bag starts there.
          per_sample_weights: one float per id.
          warmup: accepted, without effect.

        Raises: ValueError or TypeError: naming the id, bag or offset that is wrong.
        """
        del warmup
        return self.lookup(indices, offsets, per_sample_weights)[0]

    def vjp(
        self, indices: Any, offsets: Any = None, per_sample_weights: Any = None
    ) -> tuple[Float[Array, "batch dim"], Callable[[Array], TTGradients | None]]:
        """Pooled rows, and `backward(d_output)`.

        With `sparse=True` backward steps the cores, once, and returns None. With `sparse=False` it changes nothing and
        returns `TTGradients`.
        """
        (output,), backward = self.lookup_vjp(indices, offsets, per_sample_weights)
        return output, lambda d_output: backward([d_output])


SHAPES = ("tt_ranks", "tt_p_shapes", "tt_q_shapes")
AFTER_SHAPES = (
    *("optimizer", "learning_rate", "eps", "sparse", "use_cache", "cache_size", "hashtbl_size", "weight_dist"),
    "enforce_embedding_dim",
)


def by_name(
    published: Sequence[Any], shapes: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Ranks, row and column factors, and all other arguments, of which any may be given by position.

    Raises: TypeError: one is given twice or unknown, there are too many, or ranks are missing.
    """
    given = {name: value for name, value in zip(SHAPES, shapes, strict=True) if value is not None} | dict(options)
    places = [name for name in (*SHAPES, *AFTER_SHAPES) if name != "tt_ranks" or name not in given]
    if len(published) > len(places):
        raise TypeError(f"too many arguments by position: {len(published)} for {', '.join(places)}.")
    for name, value in zip(places, published, strict=False):
        if value is None:
            continue
        if name in given:
            raise TypeError(f"{name} is given by position and by keyword.")
        given[name] = value
    known = {*SHAPES, *inspect.signature(TTTables.__init__).parameters} - {"self", "specs"}
    if unknown := [name for name in given if name not in known | {"enforce_embedding_dim"}]:
        raise TypeError(f"there is no argument {unknown[0]!r}{did_you_mean(unknown[0], known)}.")
    if "tt_ranks" not in given:
        raise TypeError(
            "tt_ranks is missing: one rank per boundary between cores, such as tt_ranks=[16] for two cores."
        )
    given.pop("enforce_embedding_dim", None)
    return [given.pop(name, None) for name in SHAPES], given
