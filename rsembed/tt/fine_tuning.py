"""Training cores on towards a table that they were made from."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.checks import validated
from rsembed.tt.chain import Cores
from rsembed.tt.checks import check_numbers
from rsembed.tt.cores import check_cores, rows
from rsembed.tt.spec import TTSpec

DRAWS_AT_ONCE = 2**22
"""Rows drawn before they are trained on, which bounds the memory of long runs."""


@validated
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

    Raises: ValueError: the table has another shape than the spec; the weights are negative, not finite or all zero; or
      there are no rows per step, fewer than 0 steps, or a learning rate that is negative or not finite.
    """
    check_cores(spec, cores)
    if np.shape(table) != (spec.num_embeddings, spec.embedding_dim):
        raise ValueError(
            f"the table has shape {np.shape(table)}, the spec {(spec.num_embeddings, spec.embedding_dim)}."
        )
    if num_steps < 0 or batch_rows < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 0, and batch_rows={batch_rows} at least 1.")
    check_numbers(learning_rate=learning_rate)
    dense = np.asarray(table, np.float32)
    weights = None if row_weights is None else np.asarray(row_weights, np.float64)
    if weights is not None and (
        weights.shape != dense.shape[:1] or not np.isfinite(weights).all() or weights.min() < 0 or not weights.any()
    ):
        raise ValueError(f"row_weights must be {len(dense)} numbers, finite, not negative and not all zero.")
    scale = float(np.average(np.einsum("vd,vd->v", dense, dense, dtype=np.float64), weights=weights)) or 1.0
    wide = tuple(jnp.asarray(core, jnp.float32) for core in cores)
    root_mean_square = float(np.sqrt(sum(float(jnp.sum(core**2)) for core in wide) / spec.num_params))
    task = _Task(jnp.asarray(dense), jnp.float32(scale), jnp.float32(learning_rate * root_mean_square))
    generator = np.random.default_rng(np.asarray(jax.random.bits(key, (4,))))
    cumulative = None if weights is None else np.cumsum(weights)
    state = wide, _adam(task.learning_rate, num_steps).init(wide)
    losses, at_once = [np.zeros(0, np.float32)], max(1, DRAWS_AT_ONCE // batch_rows)
    for start in range(0, num_steps, at_once):
        shape = min(at_once, num_steps - start), batch_rows
        state, some = _train(
            spec, num_steps, state, _draw_rows(generator, spec.num_embeddings, cumulative, shape), task
        )
        losses.append(np.asarray(some))
    return tuple(new.astype(old.dtype) for new, old in zip(state[0], cores, strict=True)), np.concatenate(losses)


class _Task(NamedTuple):
    """What is trained towards: the rows, the mean square that losses are relative to, and the first learning rate."""

    targets: Float[Array, "vocab dim"]
    scale: Float[Array, ""]
    learning_rate: Float[Array, ""]


def _adam(learning_rate: Array, num_steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(learning_rate, max(num_steps, 1)))


State: TypeAlias = tuple[Cores, optax.OptState]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _train(spec: TTSpec, num_steps: int, state: State, ids: Int[Array, "steps rows"], task: _Task) -> Any:
    """The state after some of the steps, and the loss of each."""
    optimizer = _adam(task.learning_rate, num_steps)

    def step(state: State, ids: Array) -> tuple[State, Array]:
        cores, slots = state

        def loss(cores: Cores) -> Array:
            return jnp.mean(jnp.sum((rows(spec, cores, ids) - task.targets[ids]) ** 2, axis=1)) / task.scale

        value, gradients = jax.value_and_grad(loss)(cores)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            changes, slots = optimizer.update(gradients, slots, cores)
        return (optax.apply_updates(cores, changes), slots), value

    return jax.lax.scan(step, state, ids)


def _draw_rows(
    generator: np.random.Generator, num_rows: int, cumulative: np.ndarray | None, shape: tuple[int, ...]
) -> np.ndarray:
    """Rows in proportion to their weights, on the host: float32 has too few values to name every row of a big table."""
    if cumulative is None:
        return generator.integers(0, num_rows, shape, dtype=np.int32)
    last = np.searchsorted(cumulative, cumulative[-1])  # a product may round up to the total
    rows = np.searchsorted(cumulative, generator.random(shape) * cumulative[-1], side="right")
    return np.minimum(rows, last).astype(np.int32)
