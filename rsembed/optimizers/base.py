"""Optimizers of embedding rows: slots and one pure rule for the rows that were looked up; rules of your own."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from rsembed.checks import check_fields, check_type, check_within, within
from rsembed.fingerprint import identity

LearningRate = float | Callable[[], Any] | Callable[[PyTree], Any]
Slots = tuple[Array, ...]
Hyperparameters = tuple[PyTree, ...]


@no_type_check  # wrong values are refused by name in __post_init__
@dataclasses.dataclass(frozen=True, repr=False)
class OptimizerSpec(abc.ABC):
    """Optimizer that steps the rows of a table that a batch has looked up.

    Args:
      learning_rate: a number, a callable of nothing, or a callable of the 0-based step.

    Raises: ValueError: a number outside the interval that its field declares, or NaN.
    """

    learning_rate: LearningRate = within("[0, inf)", default=0.001)

    rule_name: ClassVar[str] = ""
    """Short name of the rule, by which files tell rules apart."""
    rule_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that the rule receives after the learning rate."""
    slot_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields with the initial value of each slot; without them named slots start at zero."""
    non_negative_slots: ClassVar[tuple[str, ...]] = ()
    """Names of slots that the rule never makes negative, such as sums of squares; a table that has such is refused."""
    fused_as: ClassVar[str | None] = None
    """Name of the formula in the native kernels that takes these hyperparameters; a subclass does not inherit it."""

    @property
    def slot_type(self) -> type:
        """Named-tuple type of the slots; a plain tuple unless a rule names them."""
        return tuple

    @property
    def needs_step(self) -> bool:
        """True when the rule itself (not only a learning-rate callable) depends on the step."""
        return False

    @property
    def is_row_wise(self) -> bool:
        """True when a row's entries share state, so that padding columns would change the numbers."""
        return False

    @property
    def moves_all_rows(self) -> bool:
        """True when a step also moves rows without a gradient; then each batch makes one step of all rows."""
        return False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"{type(self).__name__}: {field.name} is a traced value; specs are static. Pass a callable of step."
                )
            if isinstance(value, (jax.Array, np.ndarray, np.generic)) and np.ndim(value) == 0:
                object.__setattr__(self, field.name, np.asarray(value).item())
        check_fields(self)
        learning_rate_arity(self.learning_rate)

    def __repr__(self) -> str:
        """Class name with empty parentheses, as specs print it; `str(optimizer)` lists the hyperparameters."""
        return f"{type(self).__name__}()"

    def __str__(self) -> str:
        fields = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({fields})"

    @property
    def identity(self) -> str:
        """Identity of the rule without its hyperparameters' values; slots of rules of equal identity mean the same."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["learning_rate"]  # a number today may be a schedule tomorrow
        return type(self).__qualname__ + identity(fields)

    def get_learning_rate(self, step: Any = None) -> PyTree:
        """Learning rate at `step` (0-based).

        Raises: ValueError: the learning rate is a callable of step and `step` is None, or it gives a number that is not
          finite, which inside `jit` is not seen. TypeError: it gives no scalar.
        """
        if not callable(self.learning_rate):
            return self.learning_rate
        takes_step = learning_rate_arity(self.learning_rate) == 1
        if takes_step and step is None:
            raise ValueError(
                f"{type(self).__name__}: the learning rate depends on the step, but step is None; pass step=."
            )
        rate = self.learning_rate(*[step] * takes_step)
        where = f"{type(self).__name__}: what the schedule learning_rate gives"
        check_type(rate, float, where)
        if not isinstance(rate, jax.core.Tracer):
            check_within("(-inf, inf)", jax.device_get(rate), f"{where} at step {step}")
        return rate

    def get_hyperparameters(self, step: Any = None) -> Hyperparameters:
        """Scalars that the row rule receives at `step`; the learning rate comes first."""
        return tuple(
            map(as_float32, (self.get_learning_rate(step), *(getattr(self, name) for name in self.rule_fields)))
        )

    def slot_initial_values(self) -> tuple[PyTree, ...]:
        """One number (or initializer of `(key, shape)`) per slot, in the order of `slot_type`."""
        initial = tuple(getattr(self, name) for name in self.slot_fields)
        return initial or (0.0,) * len(getattr(self.slot_type, "_fields", ()))

    def slot_variables_count(self) -> int:
        """Number of arrays kept beside the table."""
        return len(self.slot_initial_values())

    def slot_variables_initializers(self) -> PyTree:
        """The slots' initial values as initializers of `(key, shape)`, in the named tuple of this optimizer."""
        constant = jax.nn.initializers.constant
        initializers: Any = tuple(v if callable(v) else constant(v) for v in self.slot_initial_values())
        return self.pack_slots(initializers)

    def init_slots(self, rows: Float[Array, "rows dim"]) -> Slots:
        """Initial slots of `rows`: arrays whose leading axis counts rows."""
        # Constant initializers ignore the key; random ones belong to the table's own initializer.
        return tuple(
            value(jax.random.key(0), rows.shape) if callable(value) else jnp.full(rows.shape, value, jnp.float32)
            for value in self.slot_initial_values()
        )

    def pack_slots(self, slots: Slots) -> PyTree:
        """The given slots as the named tuple of this optimizer."""
        return tuple(slots) if self.slot_type is tuple else self.slot_type(*slots)

    @abc.abstractmethod
    def step_rows(
        self, rows: Float[Array, "rows dim"], slots: Slots, gradients: Float[Array, "rows dim"], hyper: Hyperparameters
    ) -> tuple[Float[Array, "rows dim"], Slots]:
        """One step of distinct rows, in float32."""

    def short_name(self) -> str:
        """The name used by files and kernels: `rule_name`, or of a class without one the class's."""
        return self.rule_name or type(self).__name__


SlotKind = tuple[bool, str]
FULL, PER_ROW, ITERATION = (False, "float32"), (True, "float32"), (True, "int32")
"""Kinds of slot: whether a row has one value or one per column, and the dtype."""


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
        allowed = {"float32": (None, "float32", "bfloat16", "float16"), "int32": (None, "int32")}
        is_allowed = [asked in allowed[dtype] for asked, dtype in zip(self.slot_dtypes, own, strict=False)]
        if len(self.slot_dtypes) not in (0, len(own)) or not all(is_allowed):
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


def as_float32(value: Any) -> Array:
    """A hyperparameter as the scalar that rules compute with."""
    return jnp.asarray(value, jnp.float32)


def learning_rate_arity(learning_rate: Any) -> int:
    """Number of required positional arguments of a learning-rate callable; 0 for numbers."""
    if not callable(learning_rate):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(learning_rate).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind in (*positional, p.KEYWORD_ONLY)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise ValueError(
            f"a learning-rate callable takes no argument or the step, but {learning_rate!r} needs "
            f"{[p.name for p in required]}; bind the others with functools.partial."
        )
    if required:
        return 1
    # `lambda step=0: ...` is meant as a schedule; `lambda *_: ...` and `lambda: ...` are not.
    return int(any(p.kind in positional for p in parameters))


@dataclasses.dataclass(frozen=True, repr=False)
class Custom(OptimizerSpec):
    """A row rule of your own, written as an ordinary JAX function of one row.

    Args:
      custom_computation_fn: `fn(gradient, row, *slots, learning_rate) -> row` or `(row, *slots)`, over `[1, dim]`
        arrays; it is mapped over the touched rows, so norms and means are those of one row.
      slot_variable_initializers_tuple: one number, or initializer of `(key, shape)`, per slot; slots are `[1, dim]`.
      short_name_str: the name shown in plans and files.

    Example:
      >>> import rsembed as rs
      >>> signed = rs.optimizers.Custom(0.1, lambda g, w, lr: w - lr * jnp.sign(g))
      >>> signed.step_rows(jnp.ones((1, 2)), (), jnp.asarray([[2.0, -3.0]]), (0.1,))[0]
      Array([[0.9, 1.1]], dtype=float32)
    """

    custom_computation_fn: Callable[..., PyTree] | None = None
    slot_variable_initializers_tuple: tuple[PyTree, ...] = ()
    short_name_str: str = "custom"
    is_row_wise = True  # nothing is known of the function, so padding must not reach it

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "Custom: custom_computation_fn, which takes (gradient, row, *slots, lr),"
        check_type(self.custom_computation_fn, Callable, name)
        for value in self.slot_variable_initializers_tuple:
            check_within("(-inf, inf)", value, "Custom: slot_variable_initializers_tuple")
        count = 3 + len(self.slot_variable_initializers_tuple)
        try:
            inspect.signature(self.custom_computation_fn).bind(*range(count))  # type: ignore[arg-type]
        except ValueError:  # of a builtin nothing is known
            return
        except TypeError as error:
            raise TypeError(
                f"custom optimizer {self.short_name_str!r}: custom_computation_fn is called with {count} arguments "
                f"(gradient, row, *slots, lr), which it does not take: {error}."
            ) from error

    def slot_initial_values(self) -> tuple[PyTree, ...]:
        return tuple(self.slot_variable_initializers_tuple)

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
      transformation: of optax. Refused by name are those that need the loss or the function (`lbfgs`, `polyak_sgd`,
        line searches, `optax.contrib.momo`, `sophia`, `reduce_on_plateau`), those that keep a random key (`noisy_sgd`,
        `add_noise`, `optax.contrib.dpsgd`: all rows would get the same noise), and `lookahead`, which keeps two copies
        of its parameters.
      learning_rate: multiplies the transformation's updates; use a callable of step for a schedule over global steps.
        Negative for transformations that give the direction of the gradient, such as `optax.scale_by_adam`.

    Raises: TypeError: the transformation is of another kind, or cannot step a row from its gradient alone.
    """

    learning_rate: LearningRate = within("(-inf, inf)", default=1.0)
    transformation: Any = None
    rule_name = "optax"
    is_row_wise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "from_optax: transformation, as optax.adam(...) makes one,"
        if isinstance(self.transformation, optax.MultiSteps):
            raise TypeError(
                f"{name} is a bare optax.MultiSteps; give its .gradient_transformation(), which counts the "
                "lookups of each row, or add the gradients of batches with rsembed.combine before one step."
            )
        check_type(self.transformation, optax.GradientTransformation, name)
        maker = getattr(self.transformation.init, "__qualname__", "").partition(".")[0]
        if maker == "lookahead":  # optax would take rows for the fast copy in `init`, and fail in `update`
            raise TypeError(
                "from_optax: optax.lookahead keeps two copies of its parameters (optax.LookaheadParams), and a row is "
                "one; give the transformation inside it, or write a rule with a slot for the slow copy (Custom)."
            )
        row = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        try:
            slots = jax.eval_shape(self.init_slots, row)
            jax.eval_shape(lambda row: self.step_rows(row, self.init_slots(row), row, (1.0,)), row)
        except (TypeError, ValueError, AttributeError) as error:
            raise TypeError(f"{name} cannot step a row from its gradient alone: {error}") from error
        if any(jnp.issubdtype(slot.dtype, jax.dtypes.prng_key) for slot in slots):
            raise TypeError(
                f"{name} keeps a random key in its state, as optax.noisy_sgd, add_noise and dpsgd do; every row would "
                "start from the same key and get the same noise. Leave the noise out, or add noise of your own to the "
                "gradients before the step."
            )

    def _state_structure(self, dim: int) -> PyTree:
        row = jax.ShapeDtypeStruct((dim,), jnp.float32)
        return jax.tree.structure(jax.eval_shape(self.transformation.init, row))

    def slot_variables_count(self) -> int:
        return self._state_structure(1).num_leaves

    def init_slots(self, rows: Array) -> Slots:
        return tuple(jax.tree.leaves(jax.vmap(self.transformation.init)(rows)))

    def pack_slots(self, slots: Slots) -> PyTree:
        """The slots in the transformation's own state type; every leaf has a leading row axis."""
        return jax.tree.unflatten(self._state_structure(1), slots)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        (lr,) = hyper
        state = jax.tree.unflatten(self._state_structure(rows.shape[-1]), slots)
        # optax relies on JAX's standard promotion (a float power of an int count), whatever the user's setting is.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = jax.vmap(self.transformation.update)(gradients, state, rows)
        return rows + lr * updates, tuple(jax.tree.leaves(state))


def from_optax(transformation: Any, *, learning_rate: LearningRate = 1.0) -> OptaxOptimizerSpec:
    """A row rule from an optax transformation; see `OptaxOptimizerSpec` for what "per row" means and what is refused.

    Example:
      >>> import optax, rsembed as rs
      >>> rs.from_optax(optax.adamw(1e-3)).slot_variables_count()
      3
    """
    return OptaxOptimizerSpec(learning_rate=learning_rate, transformation=transformation)
