"""`TableBatchedTTEmbeddingBag`: many tensor-train tables in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.checks import PositiveInt, validated
from rsembed.tt.module import SHAPES, by_name
from rsembed.tt.spec import TTSpec
from rsembed.tt.tables import TTGradients, TTTables


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
      >>> tables = TableBatchedTTEmbeddingBag(2, [10, 600], 4, tt_ranks=[2], sparse=False)
      >>> tables(jnp.asarray([[1, 2], [3, -1], [599, 0], [7, 7]])).shape  # two bags a table
      (2, 2, 4)
    """

    @validated
    def __init__(
        self,
        num_tables: PositiveInt,
        num_embeddings: int | Sequence[int],
        embedding_dim: int | Sequence[int],
        *published: Any,
        tt_ranks: Sequence[Any] | None = None,
        tt_p_shapes: Sequence[Any] | None = None,
        tt_q_shapes: Sequence[Any] | None = None,
        enforce_embedding_dim: bool = True,
        **options: Any,
    ):
        del enforce_embedding_dim  # it always is
        shapes, options = by_name(published, (tt_ranks, tt_p_shapes, tt_q_shapes), options)
        per_table = [
            _per_table("num_embeddings", num_embeddings, num_tables, isinstance(num_embeddings, Sequence)),
            _per_table("embedding_dim", embedding_dim, num_tables, isinstance(embedding_dim, Sequence)),
            *(_per_table(name, own, num_tables, _is_nested(own)) for name, own in zip(SHAPES, shapes, strict=True)),
        ]
        super().__init__([TTSpec.suggest(*arguments) for arguments in zip(*per_table, strict=True)], **options)

    def full_weight(self, table: int | None = None) -> Any:
        """One table expanded; or all: `[tables, vocab, dim]` when they are of one size, else a list."""
        if table is not None:
            return self.table_weight(table)
        return _stacked([self.table_weight(k) for k in range(len(self.specs))])

    def __call__(self, indices: Any, offsets: Any = None, per_sample_weights: Any = None, warmup: bool = True) -> Any:
        """Pooled rows `[tables, batch, dim]`; one array `[batch, dim]` per table when their dimensions differ.

        Args:
          indices: ids in the forms of `TTEmbeddingBag`, the bags of table 0 first, then as many of table 1, and so on.
          offsets: start of each of the `tables * batch` bags of flat ids; the end of the last may follow.
          per_sample_weights: one float per id.
          warmup: accepted, without effect.
        """
        del warmup
        return _stacked(self.lookup(indices, offsets, per_sample_weights))

    def vjp(
        self, indices: Any, offsets: Any = None, per_sample_weights: Any = None
    ) -> tuple[Any, Callable[[Any], TTGradients | None]]:
        """Pooled rows, and `backward(d_output)` as for `TTEmbeddingBag`."""
        outputs, backward = self.lookup_vjp(indices, offsets, per_sample_weights)
        return _stacked(outputs), lambda d_output: backward(list(d_output))


def _is_nested(shapes: Sequence[Any] | None) -> bool:
    return shapes is not None and any(shape is None or isinstance(shape, Sequence) for shape in shapes)


def _per_table(name: str, value: Any, num_tables: int, is_per_table: bool) -> list[Any]:
    if not is_per_table:
        return [value] * num_tables
    if len(value) != num_tables:
        raise ValueError(
            f"{name} has {len(value)} entries for {num_tables} tables; give one for all, or one per table."
        )
    return list(value)


def _stacked(tables: list[Array]) -> Any:
    return jnp.stack(tables) if len({table.shape for table in tables}) == 1 else tables
