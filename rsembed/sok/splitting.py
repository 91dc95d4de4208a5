"""Which variables of a model train themselves."""

from __future__ import annotations

from typing import Any

from rsembed.sok.variables import EmbeddingVariable


def split_embedding_variable_from_others(
    variables: Any,
) -> tuple[tuple[EmbeddingVariable, ...], tuple[Any, ...]]:
    """The embedding variables among `variables`, and all others, each in their order.

    Args:
      variables: a list or tuple, such as `jax.tree.leaves(nnx.state(model), is_leaf=...)`.

    Raises: ValueError: any other container.
    Source: Sparse Operation Kit, `sok.split_embedding_variable_from_others`.
    """
    if type(variables) not in (list, tuple):
        raise ValueError(
            f"variables must be a list or a tuple, got {type(variables).__name__}; for a model: "
            "[v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]."
        )
    embedding = tuple(v for v in variables if isinstance(v, EmbeddingVariable))
    return embedding, tuple(v for v in variables if not isinstance(v, EmbeddingVariable))
