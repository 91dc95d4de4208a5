"""Shared by the layers of Flax: lookups of a loss are recorded, and their activations tapped for gradients.

```
evaluate a loss, shapes only ─▶ what every layer looks up ─▶ taps: zeros, to be added to the activations
differentiate it by parameters and taps ─▶ d(taps) are d(activations) ─▶ RowGradients, or a step at once
```

Tables are no argument of the differentiated function, so no gradient as large as a table is ever made. Elsewhere each
layer guards its activations: whoever differentiates a loss by the layer's parameters without taps gets an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rsembed.checks import did_you_mean, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.stack import Activations, Batch
from rsembed.row_gradients import RowGradients, combine


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """One lookup of a layer: collection, prepared batch, and activations, which their gradients later replace."""

    collection: EmbeddingCollection = dataclasses.field(metadata={"static": True})
    batch: Batch
    activations: Activations


Calls = tuple[Call, ...]
Taps = tuple[Activations, ...]
"""Zeros that are added to the activations of each call of one layer."""


def look_up(
    collection: EmbeddingCollection, state: EmbeddingState, batch: Batch, taps: Taps, earlier: Calls
) -> tuple[Activations, Calls]:
    """Activations, with taps added, of a lookup whose rows will be stepped; and all calls up to this one."""
    batch = collection.prepare(batch)
    activations, _ = collection.lookup_vjp(state, batch)
    calls = (*earlier, Call(collection, batch, activations))
    if len(earlier) < len(taps):
        activations = jax.tree.map(jnp.add, activations, taps[len(earlier)])
    return activations, calls


def taps_of(calls: Calls) -> Taps:
    """Zeros with the shapes and dtypes of the calls' activations."""
    return tuple(jax.tree.map(lambda found: jnp.zeros(found.shape, found.dtype), call.activations) for call in calls)


def look_up_guarded(
    collection: EmbeddingCollection, state: EmbeddingState, batch: Batch, guard: Float[Array, ""], way_out: str
) -> Activations:
    """Activations of a lookup whose rows nobody will step.

    Raises: RuntimeError: a function of them is differentiated by the guard.
    """
    layer = f"the Embeddings layer of tables {', '.join(map(repr, collection.table_specs))}"
    refusal = f"{layer} would stay untrained, silently: its rows are no parameters of this gradient. {way_out}"
    return _guarded(collection.lookup(state, batch), guard, refusal)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _guarded(activations: Activations, guard: Array, refusal: str) -> Activations:
    del guard, refusal
    return activations


@_guarded.defjvp
def _refuse(refusal: str, primals: Any, tangents: Any) -> PyTree:
    raise RuntimeError(refusal)


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of a loss: dense ones of parameters, sparse ones of tables.

    Args:
      dense: gradients in the structure of the parameters.
      calls: calls of each layer, with gradients of activations. A layer's name is its path, `"towers/0/words"`.
      changed: `RowGradients` that somebody put in the place of those that follow from the calls, by layer.
    """

    dense: PyTree
    calls: dict[str, Calls]
    changed: dict[str, RowGradients] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(dense: PyTree, recorded: Mapping[str, Calls], d_taps: Mapping[str, Taps]) -> Gradients:
        """Gradients from the calls that layers recorded and the gradients of their taps."""
        calls = {
            name: tuple(dataclasses.replace(call, activations=d) for call, d in zip(own, d_taps[name], strict=True))
            for name, own in recorded.items()
        }
        return Gradients(dense, {name: own for name, own in calls.items() if own})

    @property
    def rows(self) -> dict[str, RowGradients]:
        """Gradients of distinct rows, by layer; computed on request, since a step does not need them."""
        return {name: self._rows(name) for name in self.calls}

    @validated
    def with_rows(self, rows: Mapping[str, RowGradients]) -> Gradients:
        """A copy in which some layers have other row gradients, such as clipped or accumulated ones.

        Raises: ValueError: the loss called no such layer. TypeError: the gradients are no `RowGradients`.
        """
        if unknown := sorted(set(rows) - set(self.calls)):
            near = did_you_mean(unknown[0], self.calls)
            raise ValueError(f"the loss called no layers {unknown}{near}, only {sorted(self.calls)}.")
        return dataclasses.replace(self, changed={**self.changed, **rows})

    def step(self, name: str, state: EmbeddingState) -> EmbeddingState:
        """The state of a layer after one step; after a single call, one kernel sums gradients and steps rows."""
        first, *more = self.calls[name]
        if more or name in self.changed:
            return first.collection.apply(state, self._rows(name))
        return first.collection.update(state, first.batch, first.activations)

    def _rows(self, name: str) -> RowGradients:
        if name in self.changed:
            return self.changed[name]
        each = [call.collection.row_gradients(call.batch, call.activations) for call in self.calls[name]]
        return each[0] if len(each) == 1 else combine(*each)


def in_another_transformation(layers: Iterable[str]) -> RuntimeError:
    """The error of a loss that looks up rows where their gradients cannot be recorded."""
    return RuntimeError(
        f"the loss looks up rows of the layers {sorted(layers)}, or of some, in a scan, a branch or a vmap, from where "
        "no gradients of rows come back; call the layer before it, and hand the activations in."
    )


def stepped(gradients: PyTree, states: Mapping[str, EmbeddingState], way_out: str) -> dict[str, EmbeddingState]:
    """States of the layers that a loss called, after one step by its `Gradients`; `states` are those of all layers.

    Raises: TypeError: they are no `Gradients`, and have nothing for the tables. ValueError: they are of other layers.
    """
    if not isinstance(gradients, Gradients):
        raise TypeError(f"gradients are a {type(gradients).__name__}, which has nothing for the tables. {way_out}")
    if unknown := sorted(set(gradients.calls) - set(states)):
        raise ValueError(
            f"the gradients are of layers {unknown}, but this model trains {sorted(states)}; take them from the model "
            "that is stepped."
        )
    return {name: gradients.step(name, states[name]) for name in gradients.calls}
