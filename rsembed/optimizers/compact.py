"""Rules whose slots may be stored in 16 bits, one number a row, or as the step of the last update; LAMB and LARS."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from rsembed.checks import within
from rsembed.optimizers.base import Hyperparameters, OptimizerSpec, Slots, as_float32
from rsembed.optimizers.rules import AdamSlotVariables, one_minus_power

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
        """Kind of each slot: FULL, PER_ROW or ITERATION."""

    @property
    def is_row_wise(self) -> bool:
        return any(per_row for per_row, _ in self.slot_kinds)

    def slot_initial_values(self) -> tuple[PyTree, ...]:
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
        """One step of rows as `step_rows`, whose slots are float32 or int32 step counts."""

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


class CountedAdamSlotVariables(NamedTuple):
    """Slots of Adam with first and second moment, and the number of steps of each row."""

    momentum: Any
    velocity: Any
    row_counter: Any


class LARSSlotVariables(NamedTuple):
    """Momentum: the decayed sum of past steps."""

    momentum: Any


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class _DecayingAdam(CompactOptimizerSpec):
    """Base of AdamW and LAMB: moments and decay. `AdamW` describes the fields."""

    beta_1: float = within("[0, 1)", default=0.9)
    beta_2: float = within("[0, 1)", default=0.999)
    epsilon: float = within("(0, inf)", default=1e-8)
    weight_decay: float = within("[0, inf)", default=0.0)
    has_row_wise_second_moment: bool = False
    has_row_wise_bias_correction: bool = False
    has_trust_ratio: ClassVar[bool]
    needs_step = True

    @property
    def slot_type(self) -> type:
        return CountedAdamSlotVariables if self.has_row_wise_bias_correction else AdamSlotVariables

    @property
    def is_row_wise(self) -> bool:
        return self.has_trust_ratio or super().is_row_wise

    @property
    def slot_kinds(self) -> tuple[SlotKind, ...]:
        moments = (FULL, PER_ROW if self.has_row_wise_second_moment else FULL)
        return (*moments, PER_ROW) if self.has_row_wise_bias_correction else moments

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        lr, t = hyper
        first, second, *counters = slots
        counters = [counter + 1.0 for counter in counters]
        updates = counters[0] if counters else t.astype(jnp.float32)
        squares = gradients * gradients
        squares = row_mean(squares) if self.has_row_wise_second_moment else squares
        first = self.beta_1 * first + (1.0 - self.beta_1) * gradients
        second = self.beta_2 * second + (1.0 - self.beta_2) * squares
        root = jnp.sqrt(second / one_minus_power(self.beta_2, updates)) + self.epsilon
        direction = first / one_minus_power(self.beta_1, updates) / root + self.weight_decay * rows
        if self.has_trust_ratio:
            length, step = row_norm(rows), row_norm(direction)
            lr = lr * jnp.where((length > 0) & (step > 0), length / jnp.where(step > 0, step, 1.0), 1.0)
        return rows - lr * direction, (first, second, *counters)


@dataclasses.dataclass(frozen=True, repr=False)
class AdamW(_DecayingAdam):
    """Adam with decoupled weight decay, its second moment per column or per row.

    `m += (1 - beta_1) * (g - m); v += (1 - beta_2) * (g² - v)`, both corrected by `1 - beta**t`;
    `u = m / (sqrt(v) + epsilon) + weight_decay * w; w -= lr * u`. Rows that are not looked up do not decay.

    Args:
      beta_1: decay of the first moment, when the row is touched.
      beta_2: decay of the second moment.
      epsilon: added to the root.
      weight_decay: times the learning rate.
      has_row_wise_second_moment: one moment per row, of `mean(g²)`, which saves nearly half of the state.
      has_row_wise_bias_correction: corrects by the row's own number of updates, kept in a third slot.

    Source: Kingma, Ba (2015); Loshchilov, Hutter (2019); FBGEMM `ADAM` and `PARTIAL_ROWWISE_ADAM`.
    """

    has_trust_ratio: ClassVar[bool] = False

    def short_name(self) -> str:
        return "adamw"


@dataclasses.dataclass(frozen=True, repr=False)
class LAMB(_DecayingAdam):
    """The direction `u` of `AdamW`, with steps as long as the row: `w -= lr * norm(w) / norm(u) * u`.

    The ratio is 1 if either norm is 0: rows that start at zero could never move otherwise. Arguments are those of
    AdamW.

    Source: You et al. (2020); FBGEMM `LAMB` and `PARTIAL_ROWWISE_LAMB`.
    """

    has_trust_ratio: ClassVar[bool] = True

    def short_name(self) -> str:
        return "lamb"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class LARS(CompactOptimizerSpec):
    """Momentum of steps whose length follows the row's: `m = momentum * m + a * (g + weight_decay * w); w -= m`.

    `a = lr * eta * norm(w) / (norm(g) + weight_decay * norm(w))`, and `a = lr` if either norm is 0.

    Source: You, Gitman, Ginsburg (2017); FBGEMM `LARS_SGD`.
    """

    momentum: float = within("[0, 1]", default=0.9)
    eta: float = within("[0, inf)", default=0.001)
    weight_decay: float = within("[0, inf)", default=0.0)
    slot_type = LARSSlotVariables
    slot_kinds = (FULL,)
    is_row_wise = True  # norms

    def _step(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        (lr,) = hyper
        length, slope = row_norm(rows), row_norm(gradients)
        ratio = self.eta * length / jnp.where(slope > 0, slope + self.weight_decay * length, 1.0)
        rate = lr * jnp.where((length > 0) & (slope > 0), ratio, 1.0)
        momentum = self.momentum * slots[0] + rate * (gradients + self.weight_decay * rows)
        return rows - momentum, (momentum,)

    def short_name(self) -> str:
        return "lars"
