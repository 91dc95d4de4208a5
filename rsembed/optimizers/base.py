"""Base classes of row optimizers, and adapters for custom rules and optax transformations.

An optimizer has slots (state arrays with one entry per table row) and a rule, a pure function that
updates the rows that a batch looked up.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from rsembed.checks import check_fields, check_type, check_within, within
from rsembed.fingerprint import identity

LearningRate = float | Callable[[], Any] | Callable[[PyTree], Any]
Rows = Float[Array, "rows dim"]
Slots = tuple[Array, ...]
Hyperparameters = tuple[PyTree, ...]
StepNumber = int | float | np.number | np.ndarray | Array | None
"""Number of updates of the tables so far, or None if the caller does not count updates."""


@no_type_check  # `OptimizerSpec.__post_init__` checks each field, and errors name the field.
@dataclasses.dataclass(frozen=True)
class OptimizerSpec(abc.ABC):
    """Optimizer that updates the rows of a table that a batch has looked up.

    Args:
      learning_rate: a number, or a function that returns a number. A learning-rate function has no
        arguments, or takes the step number (0 in the first step).

    Raises:
      ValueError: a field is NaN, or is outside the interval of allowed numbers.
      TypeError: a field has the wrong type or is a traced value.
    """

    learning_rate: LearningRate = within("[0, inf)", default=0.001)

    rule_name: ClassVar[str] = ""
    """Short name that identifies the rule in files."""
    rule_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that the rule receives as hyperparameters, after the learning rate."""
    slot_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that hold the initial value of each slot.

    If `slot_fields` is empty, the slots in `slot_type` start at zero.
    """
    non_negative_slots: ClassVar[tuple[str, ...]] = ()
    """Names of slots that are never negative, such as sums of squares.

    Loading negative values into a slot of `non_negative_slots` raises an error.
    """
    fused_as: ClassVar[str | None] = None
    """Name of the native kernel that computes this rule, or None.

    A subclass does not inherit the kernel, because the rule of the subclass may differ.
    """

    @property
    def slot_type(self) -> type:
        """Named tuple type of the slots, or `tuple` if the rule does not name them."""
        return tuple

    @property
    def needs_step(self) -> bool:
        """True if the rule needs the step number, even without a learning-rate schedule."""
        return False

    @property
    def is_row_wise(self) -> bool:
        """True if the update of a column depends on other columns of its row.

        A row-wise rule needs rows without padding columns, which could change the results.
        """
        return False

    @property
    def moves_all_rows(self) -> bool:
        """True if a step changes all rows of the table, including rows without a gradient."""
        return False

    def __init_subclass__(cls) -> None:
        # `dataclass` adds a `__repr__` with all fields to every class that does not define one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = OptimizerSpec.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, jax.core.Tracer):
                way_out = "specs are static. Pass a callable of step."
                raise TypeError(f"{name}: {field.name} is a traced value; {way_out}")
            if isinstance(value, (jax.Array, np.ndarray, np.generic)) and np.ndim(value) == 0:
                object.__setattr__(self, field.name, np.asarray(value).item())
        check_fields(self)
        learning_rate_arity(self.learning_rate)

    def __repr__(self) -> str:
        """Class name with empty parentheses, while `str(optimizer)` lists the hyperparameters."""
        return f"{type(self).__name__}()"

    def __str__(self) -> str:
        arguments = []
        for field in dataclasses.fields(self):
            arguments.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    @property
    def identity(self) -> str:
        """String that is equal for two rules if they can read each other's slots.

        The learning rate and the values of numeric hyperparameters are not part of the string,
        because both may change between runs.
        """
        fields = {}
        for field in dataclasses.fields(self):
            if field.name != "learning_rate":
                fields[field.name] = getattr(self, field.name)
        return type(self).__qualname__ + identity(fields)

    def get_learning_rate(self, step: StepNumber = None) -> float | Array:
        """Learning rate at `step` (0-based).

        Raises:
          ValueError: the learning rate is a function of the step and `step` is None, or the
            function returns a number that is not finite. Inside `jit`, the check for finite numbers
            is skipped.
          TypeError: the function does not return a scalar.
        """
        schedule: Any = self.learning_rate
        if not callable(schedule):
            return schedule
        name = type(self).__name__
        if learning_rate_arity(schedule) == 0:
            rate = schedule()
        elif step is None:
            problem = "the learning rate depends on the step, but step is None"
            raise ValueError(f"{name}: {problem}; pass step=.")
        else:
            rate = schedule(step)
        where = f"{name}: what the schedule learning_rate gives"
        check_type(rate, float, where)
        if not isinstance(rate, jax.core.Tracer):
            check_within("(-inf, inf)", jax.device_get(rate), f"{where} at step {step}")
        return rate

    def get_hyperparameters(self, step: StepNumber = None) -> Hyperparameters:
        """Learning rate and other hyperparameters of the rule at `step`, as float32 scalars."""
        values = [self.get_learning_rate(step)]
        values += [getattr(self, name) for name in self.rule_fields]
        return tuple(as_float32(value) for value in values)

    def slot_initial_values(self) -> tuple[PyTree, ...]:
        """Initial value of each slot: a number, or an initializer called with `(key, shape)`."""
        if self.slot_fields:
            return tuple(getattr(self, name) for name in self.slot_fields)
        return (0.0,) * len(getattr(self.slot_type, "_fields", ()))

    def slot_variables_count(self) -> int:
        """Number of slots."""
        return len(self.slot_initial_values())

    def slot_variables_initializers(self) -> PyTree:
        """A `slot_type` with one initializer for each slot, called with `(key, shape)`."""
        initializers: list[Any] = []
        for value in self.slot_initial_values():
            if not callable(value):
                value = jax.nn.initializers.constant(value)
            initializers.append(value)
        return self.pack_slots(tuple(initializers))

    def init_slots(self, rows: Rows) -> Slots:
        """Initial slots of `rows`: arrays with one entry per row along the first axis."""
        slots = []
        for value in self.slot_initial_values():
            if callable(value):
                # Initializers of slots should be constant, so all of them get the same random key.
                slots.append(value(jax.random.key(0), rows.shape))
            else:
                slots.append(jnp.full(rows.shape, value, jnp.float32))
        return tuple(slots)

    def pack_slots(self, slots: Slots) -> PyTree:
        """Converts `slots` to a `slot_type`, usually the named tuple of this optimizer."""
        if self.slot_type is tuple:
            return tuple(slots)
        return self.slot_type(*slots)

    @abc.abstractmethod
    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        """Rows and slots after one optimizer step, computed in float32.

        Args:
          rows: distinct rows of the table in float32.
          slots: slots of `rows`.
          gradients: gradient of each row, summed over the samples that read the row.
          hyper: result of `get_hyperparameters`.
        """

    def short_name(self) -> str:
        """Name of the rule in files and errors: `rule_name`, or if empty the name of the class."""
        return self.rule_name or type(self).__name__


SlotKind = tuple[bool, str]
"""`(is_per_row, dtype)` of a slot.

The shape of the slot is `[rows, 1]` if `is_per_row`, else the shape of the table.
"""
FULL: SlotKind = (False, "float32")
PER_ROW: SlotKind = (True, "float32")
ITERATION: SlotKind = (True, "int32")


@dataclasses.dataclass(frozen=True)
class CompactOptimizerSpec(OptimizerSpec):
    """Base of rules with slots that start at zero and may be stored in 16 bits.

    Rules compute in float32, whatever the dtype of the slots. Zero rows and zero gradients never
    turn a row into NaN. `step` is 0 in the first step, and `t` in a formula is `step + 1`.

    Args:
      learning_rate: a number, or a function that returns a number. A learning-rate function has no
        arguments, or takes the step number (0 in the first step).
      slot_dtypes: dtype of each slot, or None for the default dtype of a slot. With an empty tuple,
        the default, all slots have their default dtype.

    Raises: ValueError: `slot_dtypes` has the wrong length, or a slot does not support the dtype. A
      slot with the default dtype float32 supports float32, bfloat16 and float16. A slot with the
      default dtype int32 supports only int32.
    """

    slot_dtypes: tuple[str | None, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = [dtype for _, dtype in self.slot_kinds]
        allowed = {
            "float32": (None, "float32", "bfloat16", "float16"),
            "int32": (None, "int32"),
        }
        is_valid = len(self.slot_dtypes) in (0, len(defaults))
        for dtype, default in zip(self.slot_dtypes, defaults, strict=False):
            is_valid &= dtype in allowed[default]
        if not is_valid:
            raise ValueError(
                f"{type(self).__name__}: slot_dtypes={self.slot_dtypes} does not fit its slots, "
                f"which are {defaults}; give one entry each: None for its own, or float32, "
                "bfloat16 or float16 for a float32 one."
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

    def init_slots(self, rows: Rows) -> Slots:
        num_rows, num_columns = rows.shape
        dtypes = self.slot_dtypes or (None,) * len(self.slot_kinds)
        slots = []
        for (per_row, default), dtype in zip(self.slot_kinds, dtypes, strict=True):
            shape = (num_rows, num_columns)
            if per_row:
                shape = (num_rows, 1)
            slots.append(jnp.zeros(shape, dtype or default))
        return tuple(slots)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        wide_slots = []
        for slot in slots:
            if slot.dtype != jnp.int32:
                slot = slot.astype(jnp.float32)
            wide_slots.append(slot)
        rows, new_slots = self._step(rows, tuple(wide_slots), gradients, hyper)
        stored_slots = []
        for new_slot, slot in zip(new_slots, slots, strict=True):
            stored_slots.append(new_slot.astype(slot.dtype))
        return rows, tuple(stored_slots)

    @abc.abstractmethod
    def _step(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        """Rows and slots after one optimizer step, like `step_rows`, but without 16-bit slots.

        The slots in arguments and result are float32, or int32 if they contain step numbers.
        """

    def get_hyperparameters(self, step: StepNumber = None) -> Hyperparameters:
        """The learning rate and, if the rule needs the step, `t = step + 1` in int32.

        Raises: ValueError: the rule needs the step, and `step` is None.
        """
        lr = as_float32(self.get_learning_rate(step))
        if not self.needs_step:
            return (lr,)
        if step is None:
            way_out = "pass step=, the number of updates done so far"
            raise ValueError(f"{type(self).__name__} counts updates; {way_out}.")
        return lr, jnp.asarray(step, jnp.int32) + 1


def as_float32(value: object) -> Array:
    """`value` as a float32 array, the dtype that rules compute in."""
    return jnp.asarray(value, jnp.float32)


def learning_rate_arity(learning_rate: object) -> int:
    """Number of arguments of a learning-rate function: 1 (the step) or 0.

    For a learning rate that is a number instead of a function, the result is 0.

    Raises: ValueError: the function needs two arguments or more, or a keyword argument.
    """
    if not callable(learning_rate):
        return 0
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    has_positional = False
    required = []
    for parameter in inspect.signature(learning_rate).parameters.values():
        is_positional = parameter.kind in positional_kinds
        has_positional |= is_positional
        has_default = parameter.default is not parameter.empty
        if not has_default and (is_positional or parameter.kind is keyword_only):
            required.append(parameter)
    if len(required) > 1 or any(parameter.kind is keyword_only for parameter in required):
        raise ValueError(
            f"a learning-rate callable takes no argument or the step, but {learning_rate!r} needs "
            f"{[parameter.name for parameter in required]}; bind the others with functools.partial."
        )
    # `lambda step=0: ...` is a function of the step. `lambda *_: ...` and `lambda: ...` are called
    # without arguments.
    return int(has_positional)


@dataclasses.dataclass(frozen=True)
class Custom(OptimizerSpec):
    """Optimizer with a user-written rule: an ordinary JAX function of one row.

    Args:
      custom_computation_fn: `fn(gradient, row, *slots, learning_rate)` returns the new row, or
        `(row, *slots)`. The shape of each row, gradient and slot is `[1, dim]`. `jax.vmap` maps
        `fn` over the looked-up rows, so norms and means inside `fn` are per row.
      slot_variable_initializers_tuple: initial value of each slot: a number, or an initializer
        called with `(key, shape)`.
      short_name_str: name of the rule in files, error messages and descriptions of table stacks.

    Raises: TypeError: the function does not take the arguments `(gradient, row, *slots,
      learning_rate)`.

    Example:
      >>> import rsembed as rs
      >>> signed = rs.optimizers.Custom(0.1, lambda g, w, lr: w - lr * jnp.sign(g))
      >>> signed.step_rows(jnp.ones((1, 2)), (), jnp.asarray([[2.0, -3.0]]), (0.1,))[0]
      Array([[0.9, 1.1]], dtype=float32)
    """

    custom_computation_fn: Callable[..., PyTree] | None = None
    slot_variable_initializers_tuple: tuple[PyTree, ...] = ()
    short_name_str: str = "custom"
    # `custom_computation_fn` may compute the mean of a row, which padding columns would change.
    is_row_wise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "Custom: custom_computation_fn, which takes (gradient, row, *slots, lr),"
        check_type(self.custom_computation_fn, Callable, name)
        for value in self.slot_variable_initializers_tuple:
            check_within("(-inf, inf)", value, "Custom: slot_variable_initializers_tuple")
        num_arguments = 3 + len(self.slot_variable_initializers_tuple)
        try:
            signature = inspect.signature(self.custom_computation_fn)  # type: ignore[arg-type]
            signature.bind(*range(num_arguments))
        except ValueError:  # A builtin function has no signature to check.
            return
        except TypeError as error:
            raise TypeError(
                f"custom optimizer {self.short_name_str!r}: custom_computation_fn is called with "
                f"{num_arguments} arguments (gradient, row, *slots, lr), which it does not take: "
                f"{error}."
            ) from error

    def slot_initial_values(self) -> tuple[PyTree, ...]:
        return tuple(self.slot_variable_initializers_tuple)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        def step_one_row(gradient: Array, row: Array, *row_slots: Array) -> tuple[Array, ...]:
            function: Any = self.custom_computation_fn
            result = function(gradient, row, *row_slots, *hyper)
            if not isinstance(result, (tuple, list)):
                result = (result,)
            shapes = [np.shape(array) for array in result]
            if shapes != [row.shape] * (1 + len(row_slots)):
                raise ValueError(
                    f"custom optimizer {self.short_name_str!r} must return the row and its "
                    f"{len(row_slots)} slots, each of shape {row.shape}; got {shapes}."
                )
            return tuple(result)

        arrays = [array[:, None, :] for array in (gradients, rows, *slots)]
        stepped = jax.vmap(step_one_row)(*arrays)
        new_rows, *new_slots = [array[:, 0] for array in stepped]
        return new_rows, tuple(new_slots)

    def short_name(self) -> str:
        return self.short_name_str


@dataclasses.dataclass(frozen=True)
class OptaxOptimizerSpec(OptimizerSpec):
    """Optimizer that applies an optax transformation to each row, with separate state for each row.

    The step counts of a transformation (for bias correction and schedules) count the updates of one
    row. Norms inside a transformation (for trust ratios and clipping) are norms of one row. The
    state of a row changes only when the row is looked up. In a training run that looks up every row
    in every step, an elementwise transformation computes the same values as optax with a dense
    table. To clip the gradients of the whole batch, use `rsembed.clip_by_global_norm`.

    The constructor rejects transformations that need the loss or the loss function (`lbfgs`,
    `polyak_sgd`, line searches, `optax.contrib.momo`, `sophia`, `reduce_on_plateau`). The
    constructor rejects `lookahead`, which keeps two copies of the parameters, and transformations
    with a random key, because all rows would get the same noise (`noisy_sgd`, `add_noise`,
    `optax.contrib.dpsgd`).

    Args:
      transformation: result of an optax function such as `optax.adam`.
      learning_rate: factor of the transformation's updates, 1 by default. If `learning_rate` is a
        function of the step, the step is the number of training steps so far, not the number of
        updates of the row. Use a negative factor for transformations that return a direction of
        ascent, such as `optax.scale_by_adam`.

    Raises: TypeError: `transformation` is not an `optax.GradientTransformation`, or cannot
      update a row from the gradient of this row alone.
    """

    learning_rate: LearningRate = within("(-inf, inf)", default=1.0)
    transformation: Any = None
    rule_name = "optax"
    is_row_wise = True

    def __post_init__(self) -> None:
        import optax

        super().__post_init__()
        name = "from_optax: transformation, as optax.adam(...) makes one,"
        if isinstance(self.transformation, optax.MultiSteps):
            raise TypeError(
                f"{name} is a bare optax.MultiSteps; give its .gradient_transformation(), which "
                "counts the lookups of each row, or add the gradients of batches with "
                "rsembed.combine before one step."
            )
        check_type(self.transformation, optax.GradientTransformation, name)
        maker = getattr(self.transformation.init, "__qualname__", "").partition(".")[0]
        if maker == "lookahead":
            # `lookahead` expects a fast and a slow copy of the parameters in one tree, so `update`
            # would fail for a row.
            raise TypeError(
                "from_optax: optax.lookahead keeps two copies of its parameters "
                "(optax.LookaheadParams), and a row is one; give the transformation inside it, or "
                "write a rule with a slot for the slow copy (Custom)."
            )

        def step_new_row(row: Array) -> tuple[Rows, Slots]:
            return self.step_rows(row, self.init_slots(row), row, (1.0,))

        row = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        try:
            slots = jax.eval_shape(self.init_slots, row)
            jax.eval_shape(step_new_row, row)
        except (TypeError, ValueError, AttributeError) as error:
            raise TypeError(f"{name} cannot step a row from its gradient alone: {error}") from error
        if any(jnp.issubdtype(slot.dtype, jax.dtypes.prng_key) for slot in slots):
            raise TypeError(
                f"{name} keeps a random key in its state, as optax.noisy_sgd, add_noise and dpsgd "
                "do; every row would start from the same key and get the same noise. Leave the "
                "noise out, or add noise of your own to the gradients before the step."
            )

    def _state_structure(self, dim: int) -> PyTree:
        row = jax.ShapeDtypeStruct((dim,), jnp.float32)
        state = jax.eval_shape(self.transformation.init, row)
        return jax.tree.structure(state)

    def slot_variables_count(self) -> int:
        return self._state_structure(1).num_leaves

    def init_slots(self, rows: Rows) -> Slots:
        state = jax.vmap(self.transformation.init)(rows)
        return tuple(jax.tree.leaves(state))

    def pack_slots(self, slots: Slots) -> PyTree:
        """Converts `slots` to the optax state: in each leaf, the first axis is the axis of rows."""
        return jax.tree.unflatten(self._state_structure(1), slots)

    def step_rows(
        self, rows: Rows, slots: Slots, gradients: Rows, hyper: Hyperparameters
    ) -> tuple[Rows, Slots]:
        (lr,) = hyper
        structure = self._state_structure(rows.shape[-1])
        state = jax.tree.unflatten(structure, slots)
        # optax raises floats to the power of integer step counts, which strict dtype promotion
        # forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = jax.vmap(self.transformation.update)(gradients, state, rows)
        return rows + lr * updates, tuple(jax.tree.leaves(state))


def from_optax(transformation: object, *, learning_rate: LearningRate = 1.0) -> OptaxOptimizerSpec:
    """Row optimizer that applies an optax transformation, with separate state for every row.

    See `OptaxOptimizerSpec` for the meaning of the arguments, and for the transformations that this
    function rejects.

    Example:
      >>> import optax, rsembed as rs
      >>> rs.from_optax(optax.adamw(1e-3)).slot_variables_count()
      3
    """
    return OptaxOptimizerSpec(learning_rate=learning_rate, transformation=transformation)
