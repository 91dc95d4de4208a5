"""Gradients of the embedding tables in Flax models, computed from recorded lookups.

```
evaluate a loss, shapes only ─▶ lookups of every layer ─▶ taps: zeros added to the activations
gradients of parameters and taps ─▶ d(taps) = d(activations) ─▶ RowGradients, or a step directly
```

A tap is an array of zeros that is added to the activations of a lookup. The gradient of a loss with
respect to the tap equals the gradient with respect to the activations. Tables are not an argument
of the differentiated function, so no gradient has the size of a table.

If lookups are not recorded, differentiation of the model, for example by `jax.grad`, would leave
the tables untrained. To prevent untrained tables, every layer has a parameter `guard` with a custom
derivative rule, which raises an error if a lookup is differentiated without being recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, TypeAlias, no_type_check

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, PyTree

from rsembed import opaque
from rsembed.checks import check_type, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.stack import Activations, Batch
from rsembed.row_gradients import RowGradients, as_factor, combine, scale

Params: TypeAlias = PyTree
"""Dense parameters of a model, or their gradients."""
Loss: TypeAlias = Callable[..., Any]
"""Function that returns a loss, or `(loss, aux)`."""

_WAY_OUT = (
    "Use rs.nnx.value_and_grad and rs.nnx.Optimizer, or rs.linen.value_and_grad and "
    "apply_gradients of rs.linen.TrainState; or, to leave the tables as they are, make the layer "
    "with frozen=True."
)

_DECIDE = (
    "Decide for both: jax.lax.cond(jnp.isfinite(norm), step, skip), where norm is the sum of "
    "rs.global_norm of the rows and optax.tree.norm of gradients.dense."
)
_ACCUMULATE = (
    "Add the gradients of micro-batches, (first + second) / 2, or their rows by rs.combine, and "
    "make one step with the mean; to skip one, jax.lax.cond on rs.global_norm of its rows."
)
_TWO_POINTS = "Use another tx, or keep and step the second set of parameters yourself."
_PER_EXAMPLE = (
    "Clip and add noise yourself: gradients.rows and rs.clip_by_global_norm of each example."
)
_WRAPPERS = {
    "ApplyIfFiniteState": ("optax.apply_if_finite", _DECIDE),
    "ConditionallyTransformState": ("optax.conditionally_transform", _DECIDE),
    "ConditionallyMaskState": ("optax.conditionally_mask", _DECIDE),
    "MultiStepsState": ("optax.MultiSteps", _ACCUMULATE),
    "ApplyEvery": ("optax.apply_every", _ACCUMULATE),
    "AccumulateAvgUpdatesState": ("optax.experimental.aggregating", _ACCUMULATE),
    "LookaheadState": ("optax.lookahead", _TWO_POINTS),
    "SAMState": ("optax.contrib.sam", _TWO_POINTS),
    "DifferentiallyPrivateAggregateState": (
        "optax.contrib.differentially_private_aggregate",
        _PER_EXAMPLE,
    ),
}
"""Optax transformations that a model with tables cannot use.

A transformation in `_WRAPPERS` can skip, delay or change a step of the dense parameters, but not a
step of the tables. `_WRAPPERS` maps the class name of a transformation's state to a pair: the name
of the optax function, and advice for the user.
"""


def check_transformation(tx: object, where: str) -> None:
    """Checks that `tx` is an optax transformation.

    Raises: TypeError: `tx` is not an optax transformation. An `optax.MultiSteps` object is not an
      optax transformation.
    """
    if isinstance(tx, optax.MultiSteps):
        raise TypeError(_refused(where, *_WRAPPERS["MultiStepsState"]))
    check_type(tx, optax.GradientTransformation, f"{where}: tx")


def check_steps_always(opt_state: PyTree, where: str) -> None:
    """Checks that an optax transformation never skips a step, because tables never skip a step.

    Raises: ValueError: the optax state contains the state of a transformation in `_WRAPPERS`.
    """

    def is_wrapper(node: object) -> bool:
        return type(node).__name__ in _WRAPPERS

    for node in jax.tree.leaves(opt_state, is_leaf=is_wrapper):
        if is_wrapper(node):
            raise ValueError(_refused(where, *_WRAPPERS[type(node).__name__]))


def _refused(where: str, name: str, way_out: str) -> str:
    return (
        f"{where}: tx has {name}, which decides about steps of the dense parameters only; the "
        f"tables would be stepped in every update. {way_out}"
    )


@no_type_check  # JAX puts placeholders of other types into the fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """One lookup of a layer, with the prepared batch and the activations.

    In a `Gradients` object, the field `activations` contains the gradients of the activations, and
    the ids of the batch are in arrays that reject arithmetic (`rsembed.opaque`).
    """

    layer: str = dataclasses.field(metadata={"static": True})
    collection: EmbeddingCollection = dataclasses.field(metadata={"static": True})
    batch: Batch
    activations: Activations


class Recording:
    """Records the lookups of a loss in all layers that are trained.

    Args:
      layers: mapping from the argument `layer` of `look_up` to the name of the layer, for all
        layers that are trained.
      taps: for each lookup, zeros that are added to the activations. An empty list if the loss is
        evaluated only to determine the shapes of the activations.

    Raises: RuntimeError: another recording is active, because two calls of `value_and_grad` are
      nested.
    """

    def __init__(self, layers: Mapping[Any, str], taps: Sequence[Activations]):
        if _recording.get() is not None:
            raise RuntimeError(
                "value_and_grad in the loss of another value_and_grad would lose gradients of rows."
            )
        self.layers = layers
        self.taps = taps
        self.calls: list[Call] = []
        self.trace = get_opaque_trace_state(convention="flax")

    def run(self, function: Callable[..., Any], *args: PyTree, **kwargs: object) -> Any:
        """Calls `function`, records its lookups in the list `calls`, and returns its result."""
        token = _recording.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _recording.reset(token)


_recording: ContextVar[Recording | None] = ContextVar("lookups of a loss", default=None)


def look_up(
    layer: Hashable,
    collection: EmbeddingCollection,
    state: EmbeddingState,
    batch: Batch,
    guard: Float[Array, ""],
) -> Activations:
    """Activations of one lookup in an `Embeddings` layer that is not frozen.

    If the active recording has a tap for this lookup, the tap is added to the activations.

    Args:
      layer: key of the layer in `Recording.layers`.
      collection: the tables of the layer.
      state: state of the tables.
      batch: ids of every feature.
      guard: parameter of the layer that does not change the activations. Differentiation with
        respect to `guard` raises an error, unless the lookups of the loss are recorded.

    Raises: RuntimeError: the activations are differentiated without a recording, which would leave
      the tables untrained, or the loss calls the layer inside another JAX transformation, such as a
      loop, where lookups cannot be recorded.
    """
    recording = _recording.get()
    if recording is not None and get_opaque_trace_state(convention="flax") != recording.trace:
        raise RuntimeError(
            f"the loss looks up rows of the layers {sorted(recording.layers.values())}, or of "
            "some, in a scan, a branch, a vmap, a remat or a jit, from where no gradients of "
            "rows come back; call the layer before it, and hand the activations in."
        )
    if recording is None or layer not in recording.layers:
        tables = ", ".join(map(repr, collection.table_specs))
        refusal = f"the Embeddings layer of tables {tables} would stay untrained, silently: its rows are no parameters"
        return _guarded(
            collection.lookup(state, batch), guard, f"{refusal} of this gradient. {_WAY_OUT}"
        )
    batch = collection.prepare(batch)
    number = len(recording.calls)
    activations, _ = collection.lookup_vjp(state, batch)
    recording.calls.append(Call(recording.layers[layer], collection, batch, activations))
    if not recording.taps:
        return activations
    return jax.tree.map(jnp.add, activations, recording.taps[number])


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _guarded(activations: Activations, guard: Array, refusal: str) -> Activations:
    del guard, refusal
    return activations


@_guarded.defjvp
def _refuse(refusal: str, primals: object, tangents: object) -> PyTree:
    raise RuntimeError(refusal)


@no_type_check  # JAX puts placeholders of other types into the fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of a loss: dense gradients of parameters, and sparse gradients of tables.

    `first + second` adds the gradients of two losses, and `gradients / 2` halves gradients, both
    for parameters and for rows. `jax.tree.map(jnp.add, first, second)` raises a TypeError, because
    row numbers cannot be added.

    Args:
      dense: gradients in the structure of the parameters.
      calls: mapping from the path of a layer, such as `"towers/0/words"`, to the lookups of the
        layer, with the gradients of their activations.
      changed: mapping from the path of a layer to the `RowGradients` that replace the layer's row
        gradients, see `with_rows`.
    """

    dense: Params
    calls: dict[str, list[Call]]
    changed: dict[str, RowGradients] = dataclasses.field(default_factory=dict)

    # If `__array_ufunc__` is None, NumPy calls `__rmul__` for `np.float32(2) * gradients`.
    __array_ufunc__: ClassVar[None] = None

    def __add__(self, other: object) -> Gradients:
        if not isinstance(other, Gradients):
            return NotImplemented
        dense = jax.tree.map(jnp.add, self.dense, other.dense)
        rows = self.rows
        for name, other_rows in other.rows.items():
            if name in rows:
                rows[name] = combine(rows[name], other_rows)
            else:
                rows[name] = other_rows
        # `rows` already contains the sums of the row gradients, so an optimizer step reads only the
        # field `collection` of each call in `calls`. The fields `batch` and `activations` can be
        # empty.
        calls = {}
        all_calls = {**self.calls, **other.calls}
        for name, layer_calls in all_calls.items():
            empty_call = dataclasses.replace(layer_calls[0], batch={}, activations={})
            calls[name] = [empty_call]
        return Gradients(dense, calls, rows)

    def __radd__(self, other: object) -> Gradients:
        # `sum([first, second])` first computes `0 + first`, so 0 is accepted.
        if isinstance(other, int) and other == 0:
            return self
        return NotImplemented

    def __mul__(self, factor: object) -> Gradients:
        if isinstance(factor, Gradients):
            return NotImplemented
        number = as_factor(factor)

        def scaled(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda array: array * jnp.asarray(number, array.dtype), tree)

        calls = {}
        for name, layer_calls in self.calls.items():
            scaled_calls = []
            for call in layer_calls:
                activations = scaled(call.activations)
                scaled_calls.append(dataclasses.replace(call, activations=activations))
            calls[name] = scaled_calls
        changed = {name: scale(rows, number) for name, rows in self.changed.items()}
        dense = scaled(self.dense)
        return Gradients(dense, calls, changed)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Gradients:
        if isinstance(divisor, Gradients):
            return NotImplemented
        return self * (1.0 / as_factor(divisor))

    @property
    def rows(self) -> dict[str, RowGradients]:
        """Dictionary from the path of each layer to the gradients of its distinct rows.

        If the loss reads a row several times, the gradients of the row are summed.
        """
        return {name: self._rows(name) for name in self.calls}

    @validated
    def with_rows(self, rows: Mapping[str, RowGradients]) -> Gradients:
        """A copy with new row gradients of some layers, such as clipped or accumulated gradients.

        Args:
          rows: mapping from the path of a layer to the layer's new row gradients.

        Raises:
          ValueError: `rows` contains a layer that the loss did not call.
          TypeError: a value is not a `RowGradients`.
        """
        if unknown := sorted(set(rows) - set(self.calls)):
            raise ValueError(f"the loss called no layers {unknown}, only {sorted(self.calls)}.")
        return dataclasses.replace(self, changed={**self.changed, **rows})

    def step(self, name: str, state: EmbeddingState) -> EmbeddingState:
        """State of a layer's tables after one optimizer step.

        If the loss called the layer only once, and `changed` does not contain the layer, a single
        kernel sums gradients and updates rows.
        """
        first, *more = self.calls[name]
        if more or name in self.changed:
            return first.collection.apply(state, self._rows(name))
        return first.collection.update(state, opaque.unwrap_all(first.batch), first.activations)

    def _rows(self, name: str) -> RowGradients:
        if name in self.changed:
            return self.changed[name]
        each = []
        for call in self.calls[name]:
            batch = opaque.unwrap_all(call.batch)
            each.append(call.collection.row_gradients(batch, call.activations))
        return each[0] if len(each) == 1 else combine(*each)


def value_and_gradients(differentiated: Any) -> tuple[Any, Gradients]:
    """Value of a loss, and its gradients with respect to parameters and tables.

    Args:
      differentiated: result of `value_and_grad` for a function of parameters and taps, which
        returns the loss, and as auxiliary output its value for the user and the recorded lookups.
    """
    (_, (value, recorded)), (dense, d_taps) = differentiated
    calls: dict[str, list[Call]] = {}
    for call, gradients in zip(recorded, d_taps, strict=True):
        batch = opaque.wrap_integers(call.batch)
        call = dataclasses.replace(call, batch=batch, activations=gradients)
        layer_calls = calls.setdefault(call.layer, [])
        layer_calls.append(call)
    return value, Gradients(dense, calls)


def stepped(gradients: object, states: Mapping[str, EmbeddingState]) -> dict[str, EmbeddingState]:
    """States of the layers that the loss called, after one optimizer step.

    Args:
      gradients: the `Gradients` of the loss.
      states: mapping from the path of each trained layer to the state of its tables.

    Raises:
      TypeError: `gradients` is not a `Gradients` object, so there are no gradients of tables.
      ValueError: `gradients` contains a layer that is not in `states`.
    """
    if not isinstance(gradients, Gradients):
        raise TypeError(
            f"gradients are a {type(gradients).__name__}, which has nothing for the tables. {_WAY_OUT}"
        )
    if unknown := sorted(set(gradients.calls) - set(states)):
        raise ValueError(
            f"gradients are of layers {unknown}, but the model trains {sorted(states)}; step their model."
        )
    return {name: gradients.step(name, states[name]) for name in gradients.calls}
