"""Rules of your own: any function of one row, any optax transformation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from rsembed.checks import check_within, within
from rsembed.optimizers.base import Hyperparameters, LearningRate, OptimizerSpec, Slots


@dataclasses.dataclass(frozen=True, repr=False)
class CustomOptimizerSpec(OptimizerSpec):
    """Any rule of one row, written as an ordinary JAX function.

    Args:
      custom_computation_fn: `fn(gradient, row, *slots, learning_rate) -> row` or `(row, *slots)`, over `[1, dim]`
        arrays; it is mapped over the touched rows, so norms and means are those of one row.
      slot_variable_initializers_tuple: one number, or initializer of `(key, shape)`, per slot; slots are `[1, dim]`.
      short_name_str: the name shown in plans and files.

    Example:
      >>> import rsembed as rs
      >>> signed = rs.CustomOptimizerSpec(0.1, lambda g, w, lr: w - lr * jnp.sign(g))
      >>> signed.step_rows(jnp.ones((1, 2)), (), jnp.asarray([[2.0, -3.0]]), (0.1,))[0]
      Array([[0.9, 1.1]], dtype=float32)
    """

    custom_computation_fn: Callable[..., Any] | None = None
    slot_variable_initializers_tuple: tuple[Any, ...] = ()
    short_name_str: str = "custom"
    is_row_wise = True  # nothing is known of the function, so padding must not reach it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.custom_computation_fn):
            raise TypeError(
                "CustomOptimizerSpec: custom_computation_fn must be a function of (gradient, row, *slots, lr)."
            )
        for value in self.slot_variable_initializers_tuple:
            check_within("(-inf, inf)", value, "CustomOptimizerSpec: slot_variable_initializers_tuple")
        count = 3 + len(self.slot_variable_initializers_tuple)
        try:
            inspect.signature(self.custom_computation_fn).bind(*range(count))
        except ValueError:  # of a builtin nothing is known
            return
        except TypeError as error:
            raise TypeError(
                f"custom optimizer {self.short_name_str!r}: custom_computation_fn is called with {count} arguments "
                f"(gradient, row, *slots, lr), which it does not take: {error}."
            ) from error

    def slot_initial_values(self) -> tuple[Any, ...]:
        return tuple(self.slot_variable_initializers_tuple)

    def init_slots(self, rows: Array) -> Slots:
        key = jax.random.key(0)  # constant initializers ignore it; random ones belong to the table's own initializer
        return tuple(
            value(key, rows.shape) if callable(value) else jnp.full(rows.shape, value, jnp.float32)
            for value in self.slot_initial_values()
        )

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        def one_row(gradient: Array, row: Array, *row_slots: Array) -> tuple[Array, ...]:
            result = self.custom_computation_fn(gradient, row, *row_slots, *hyper)  # type: ignore[misc]
            result = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            if len(result) != 1 + len(row_slots) or any(np.shape(r) != row.shape for r in result):
                raise ValueError(
                    f"custom optimizer {self.short_name_str!r} must return the row and its {len(row_slots)} slots, "
                    f"each of shape {row.shape}; got {[np.shape(r) for r in result]}."
                )
            return result

        expanded = [x[:, None, :] for x in (gradients, rows, *slots)]
        row, *new_slots = jax.vmap(one_row)(*expanded)
        return row[:, 0], tuple(s[:, 0] for s in new_slots)

    def short_name(self) -> str:
        return self.short_name_str


@dataclasses.dataclass(frozen=True, repr=False)
class OptaxOptimizerSpec(OptimizerSpec):
    """An optax transformation as a row rule: every row is a parameter of its own, with its own optimizer state.

    What that means: counts (bias correction, schedules inside the transformation) count the steps of *that row*;
    norms (trust ratios, clipping) are those of one row; and all of them advance only when the row is looked up.
    If every row is touched in every step, elementwise transformations give the numbers of dense optax.
    Clip the gradient of the whole batch with `rsembed.clip_by_global_norm` instead.

    Args:
      transformation: anything with optax's `init` and `update`.
      learning_rate: multiplies the transformation's updates; use a callable of step for a schedule over global steps.
        Negative for transformations that give the direction of the gradient, such as `optax.scale_by_adam`.
    """

    learning_rate: LearningRate = within("(-inf, inf)", default=1.0)
    transformation: Any = None
    is_row_wise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.transformation, optax.GradientTransformation):
            raise TypeError(
                f"from_optax takes an optax GradientTransformation, as optax.adam(...) makes one, got "
                f"{type(self.transformation).__name__}."
            )

    def _state_structure(self, dim: int) -> Any:
        row = jax.ShapeDtypeStruct((dim,), jnp.float32)
        return jax.tree.structure(jax.eval_shape(self.transformation.init, row))

    def slot_variables_count(self) -> int:
        return self._state_structure(1).num_leaves

    def init_slots(self, rows: Array) -> Slots:
        return tuple(jax.tree.leaves(jax.vmap(self.transformation.init)(rows)))

    def pack_slots(self, slots: Slots) -> Any:
        """The slots in the transformation's own state type; every leaf has a leading row axis."""
        return jax.tree.unflatten(self._state_structure(1), slots)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        (lr,) = hyper
        state = jax.tree.unflatten(self._state_structure(rows.shape[-1]), slots)
        # optax relies on JAX's standard promotion (a float power of an int count), whatever the user's setting is.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = jax.vmap(self.transformation.update)(gradients, state, rows)
        return rows + lr * updates, tuple(jax.tree.leaves(state))

    def short_name(self) -> str:
        return "optax"


def from_optax(transformation: Any, *, learning_rate: LearningRate = 1.0) -> OptaxOptimizerSpec:
    """A row rule from any optax transformation; see `OptaxOptimizerSpec` for what "per row" means.

    Example:
      >>> import optax, rsembed as rs
      >>> rs.from_optax(optax.adamw(1e-3)).slot_variables_count()
      3
    """
    return OptaxOptimizerSpec(learning_rate=learning_rate, transformation=transformation)
