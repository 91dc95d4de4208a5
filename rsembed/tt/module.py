"""`TTEmbeddingBag`: a drop-in for an embedding bag whose table is a tensor train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from rsembed.intervals import door
from rsembed.tt.cores import check_cores
from rsembed.tt.spec import TTSpec
from rsembed.tt.tables import TTGradients, TTTables


class TTEmbeddingBag(TTTables):
    """An embedding bag over a table of `num_embeddings` rows that is never stored, only its tensor-train cores.

    Args:
      num_embeddings: rows.
      embedding_dim: any length of row.
      shapes: `tt_ranks, tt_p_shapes, tt_q_shapes` by position; without `tt_ranks` when it is given by keyword.
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
        three times the cache. With `sparse=False` it is always 0, since an optimizer outside knows a row by its place.
      populate_every: populate before every so many counted lookups; 0 leaves it to you.
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

    @door
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *shapes: Sequence[int] | None,
        tt_ranks: Sequence[int] | None = None,
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
        enforce_embedding_dim: bool = True,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        use_cache: bool = True,
        **options: Any,
    ):
        del enforce_embedding_dim
        for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
            if value:
                raise NotImplementedError(f"{name}={value!r} is not offered: no row is stored that it could change.")
        ranks, p_shapes, q_shapes = positional_shapes(shapes, tt_ranks, tt_p_shapes, tt_q_shapes)
        super().__init__(
            [TTSpec.suggest(num_embeddings, embedding_dim, ranks, p_shapes, q_shapes)], use_cache=use_cache, **options
        )

    @property
    def spec(self) -> TTSpec:
        """Rows, factors and ranks."""
        return self.specs[0]

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.spec.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Length of a row."""
        return self.spec.embedding_dim

    @property
    def tt_p_shapes(self) -> list[int]:
        """Row factors."""
        return list(self.spec.tt_p_shapes)

    @property
    def tt_q_shapes(self) -> list[int]:
        """Column factors."""
        return list(self.spec.tt_q_shapes)

    @property
    def tt_ranks(self) -> list[int]:
        """All ranks, from 1 to 1, as published."""
        return list(self.spec.ranks)

    @property
    def optimizer_state(self) -> list[Array]:
        """The state of the fused update, one array per core and slot."""
        return jax.tree.leaves(self.slots[0].get_value())

    @property
    def cache_weight(self) -> Float[Array, "rows dim"] | None:
        """The cached rows, None without a cache."""
        return self.caches[0].rows.get_value() if self.caches else None

    @property
    def tt_cores(self) -> Sequence[nnx.Variable]:
        """The cores' variables, `[p_t, R_{t-1} * q_t * R_t]` each."""
        return self.core_groups[0]

    def set_cores(self, cores: Sequence[Array]) -> None:
        """Puts cores in place, such as those of `from_dense`. Raises: ValueError: their shapes do not fit."""
        for variable, core in zip(self.tt_cores, check_cores(self.spec, tuple(cores)), strict=True):
            variable.set_value(core.astype(self.dtype))

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


def positional_shapes(
    shapes: Sequence[Any], tt_ranks: Any, tt_p_shapes: Any, tt_q_shapes: Any
) -> tuple[Sequence[Any], Any, Any]:
    """Ranks, row and column factors, given by position or by keyword.

    Raises: TypeError: one is given twice, there are too many, or ranks are missing.
    """
    names = ["tt_ranks", "tt_p_shapes", "tt_q_shapes"]
    given = {"tt_ranks": tt_ranks, "tt_p_shapes": tt_p_shapes, "tt_q_shapes": tt_q_shapes}
    places = names[1:] if tt_ranks is not None else names
    if len(shapes) > len(places):
        raise TypeError(f"too many shapes by position: {len(shapes)} for {', '.join(places)}.")
    for name, value in zip(places, shapes, strict=False):
        if given[name] is not None and value is not None:
            raise TypeError(f"{name} is given by position and by keyword.")
        given[name] = given[name] if value is None else value
    if given["tt_ranks"] is None:
        raise TypeError(
            "tt_ranks is missing: one rank per boundary between cores, such as tt_ranks=[16] for two cores."
        )
    return given["tt_ranks"], given["tt_p_shapes"], given["tt_q_shapes"]
