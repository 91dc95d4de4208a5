"""Rules whose slots may be stored in 16 bits, one number a row, or as the step of the row's last update."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rsembed.optimizers.base import Hyperparameters, OptimizerSpec, Slots, as_float32

SlotKind = tuple[bool, str]
FULL, PER_ROW, ITERATION = (False, "float32"), (True, "float32"), (True, "int32")
"""Kinds of slot: whether a row has one value or one per column, and the dtype."""

_SLOT_DTYPES = (None, "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, repr=False)
class CompactOptimizerSpec(OptimizerSpec):
    """A rule whose slots all start at zero and may be stored in 16 bits.

    `step` counts from 0, as everywhere; the formulas' `t = step + 1` is the number of the update. Rules compute in
    float32, whatever the slots are stored in, and never move a row to NaN for being zero or for a zero gradient.

    Args:
      learning_rate: a number, a callable of nothing, or a callable of the 0-based step.
      slot_dtypes: dtype of each slot, None for its own; empty for all their own.

    Raises: ValueError: as many dtypes as slots are needed; only float slots can have another, of 16 or 32 bits.
    """

    slot_dtypes: tuple[str | None, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        own = [dtype for _, dtype in self.slot_kinds]
        is_possible = len(self.slot_dtypes) in (0, len(own)) and all(
            asked in (_SLOT_DTYPES if dtype == "float32" else (None, dtype))
            for asked, dtype in zip(self.slot_dtypes, own, strict=False)
        )
        if not is_possible:
            raise ValueError(
                f"{type(self).__name__}: slot_dtypes={self.slot_dtypes} does not fit its slots, which are {own}; give "
                "one entry each: None for its own, or float32, bfloat16 or float16 for a float32 one."
            )

    @property
    @abc.abstractmethod
    def slot_kinds(self) -> tuple[SlotKind, ...]:
        """FULL, PER_ROW or ITERATION for each slot."""

    @property
    def is_row_wise(self) -> bool:
        return any(per_row for per_row, _ in self.slot_kinds)

    def slot_initial_values(self) -> tuple[Any, ...]:
        return (0.0,) * len(self.slot_kinds)

    def init_slots(self, rows: Array) -> Slots:
        asked = self.slot_dtypes or (None,) * len(self.slot_kinds)
        return tuple(
            jnp.zeros((rows.shape[0], 1 if per_row else rows.shape[1]), dtype or own)
            for (per_row, own), dtype in zip(self.slot_kinds, asked, strict=True)
        )

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        read = tuple(slot if slot.dtype == jnp.int32 else slot.astype(jnp.float32) for slot in slots)
        rows, stepped = self._step(rows, read, gradients, hyper)
        return rows, tuple(new.astype(old.dtype) for new, old in zip(stepped, slots, strict=True))

    @abc.abstractmethod
    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        """`step_rows` of slots that have float32 entries, or int32 ones that count steps."""

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        """The learning rate and, for a rule that needs the step, `t = step + 1` as an int32.

        Raises: ValueError: no step.
        """
        lr = as_float32(self.get_learning_rate(step))
        if not self.needs_step:
            return (lr,)
        if step is None:
            raise ValueError(f"{type(self).__name__} counts updates; pass step=, the number of updates done so far.")
        return lr, jnp.asarray(step, jnp.int32) + 1


def row_mean(values: Array) -> Array:
    """Mean of each row, `[rows, 1]`."""
    return jnp.mean(values, axis=-1, keepdims=True)


def row_norm(values: Array) -> Array:
    """Length of each row, `[rows, 1]`."""
    return jnp.sqrt(jnp.sum(values * values, axis=-1, keepdims=True))
