"""Training cores on towards a table that they were made from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from rsembed.tt.chain import Cores
from rsembed.tt.cores import check_cores, rows
from rsembed.tt.spec import TTSpec


def fine_tune(
    spec: TTSpec,
    cores: Cores,
    table: Float[Array | np.ndarray, "vocab dim"],
    *,
    key: PRNGKeyArray,
    row_weights: Float[np.ndarray, " vocab"] | None = None,
    num_steps: int = 300,
    batch_rows: int = 4096,
    learning_rate: float = 3e-3,
) -> tuple[Cores, Float[np.ndarray, " steps"]]:
    """Cores closer to the rows that matter, by Adam on rows drawn in proportion to their weights.

    TT-SVD treats all rows alike, and all entries of a train depend on each other: where few rows make most lookups,
    trading errors of rare rows for those of frequent ones lowers the error that lookups see. To train towards a model's
    own loss instead, put the cores into a `TTEmbeddingBag` with `set_cores`, and train that.

    Args:
      spec: the table.
      cores: where to start, such as those of `from_dense` or of the entry "tt" of `compress`.
      table: the rows to come close to.
      key: draws the rows.
      row_weights: how often a row is looked up; None means all equally often.
      num_steps: steps of the optimizer, 0 or more; more of them for large tables.
      batch_rows: rows per step.
      learning_rate: at the start, as a multiple of the cores' root mean square; it falls to zero along a cosine.

    Returns:
      The cores, in their dtype, and the loss of every step: the mean squared distance of the drawn rows, over the
      weighted mean square of the table's rows. Its root is a relative error.

    Raises: ValueError: the table has another shape than the spec, or the weights are negative, not finite or all zero.
    """
    check_cores(spec, cores)
    if np.shape(table) != (spec.num_embeddings, spec.embedding_dim):
        raise ValueError(
            f"the table has shape {np.shape(table)}, the spec {(spec.num_embeddings, spec.embedding_dim)}."
        )
    dense = np.asarray(table, np.float32)
    weights = np.ones(len(dense)) if row_weights is None else np.asarray(row_weights, np.float64)
    if weights.shape != dense.shape[:1] or not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise ValueError(f"row_weights must be {len(dense)} numbers, finite, not negative and not all zero.")
    scale = float(np.average((dense.astype(np.float64) ** 2).sum(1), weights=weights)) or 1.0
    cumulative = jnp.asarray(np.cumsum(weights) / weights.sum(), jnp.float32)
    targets, wide = jnp.asarray(dense), tuple(jnp.asarray(core, jnp.float32) for core in cores)
    root_mean_square = float(np.sqrt(sum(float(jnp.sum(core**2)) for core in wide) / spec.num_params))
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate * root_mean_square, max(num_steps, 1)))

    def step(state: tuple[Cores, optax.OptState], key: PRNGKeyArray) -> tuple[tuple[Cores, optax.OptState], Array]:
        cores, slots = state
        ids = jnp.searchsorted(cumulative, jax.random.uniform(key, (batch_rows,)))
        ids = jnp.minimum(ids, spec.num_embeddings - 1).astype(jnp.int32)

        def loss(cores: Cores) -> Array:
            return jnp.mean(jnp.sum((rows(spec, cores, ids) - targets[ids]) ** 2, axis=1)) / scale

        value, gradients = jax.value_and_grad(loss)(cores)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            changes, slots = optimizer.update(gradients, slots, cores)
        return (optax.apply_updates(cores, changes), slots), value

    run = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))
    (tuned, _), losses = run((wide, optimizer.init(wide)), jax.random.split(key, num_steps))
    return tuple(new.astype(old.dtype) for new, old in zip(tuned, cores, strict=True)), np.asarray(losses)
