"""What tables need to have equal bits on any number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rsembed.bags import Bags
from rsembed.collection.layout import RowLayout
from rsembed.optimizers import Hyperparameters, OptimizerSpec, Slots

# A multiple of all vector widths, so that no row of a block is computed otherwise than the others.
ROWS_PER_BLOCK = 256


@dataclasses.dataclass(frozen=True, repr=False)
class InBlocks(OptimizerSpec):
    """A rule that is applied to blocks of one size.

    What a compiler makes of sums over a row depends on how many rows there are, and so on the number of devices.
    """

    rule: Any = None

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        num_rows = rows.shape[0]
        num_blocks = -(-num_rows // ROWS_PER_BLOCK)

        def cut(array: Array) -> Array:
            missing = num_blocks * ROWS_PER_BLOCK - num_rows
            padded = jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
            return padded.reshape(num_blocks, ROWS_PER_BLOCK, *array.shape[1:])

        def step_block(block: Any) -> Any:
            # Barriers keep a block's program apart from what is around it.
            stepped = self.rule.step_rows(*jax.lax.optimization_barrier(block), hyper)
            return jax.lax.optimization_barrier(stepped)

        stepped = jax.lax.map(step_block, jax.tree.map(cut, (rows, slots, gradients)))
        result: tuple[Array, Slots] = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], stepped)
        return result

    def short_name(self) -> str:
        return self.rule.short_name()


def occurrence_numbers(layout: RowLayout, bags: Mapping[str, Bags]) -> Int[Array, " nnz"]:
    """Number of every occurrence on this device, sample by sample: as the global batch counts them."""
    names = [feature.name for feature in layout.stack.features]
    num_samples = bags[names[0]].num_bags
    if any(bags[name].num_bags != num_samples for name in names):
        raise ValueError(f"reproducible= needs equally many samples of features {names}, which share their tables.")
    widths = [bags[name].ids.shape[0] // max(num_samples, 1) for name in names]
    first = jnp.arange(num_samples, dtype=jnp.int32)[:, None] * sum(widths)
    positions = np.split(np.arange(sum(widths), dtype=np.int32), np.cumsum(widths)[:-1])
    return jnp.concatenate([(first + own[None, :]).reshape(-1) for own in positions])
