"""Group lookups of many tables, as DeepRec offers them: a function over lists, and columns made in a scope."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from rsembed.bags import Bags, as_bags, device_copy
from rsembed.checks import check_type, describe, validated
from rsembed.collection import inputs
from rsembed.collection.devices import Devices
from rsembed.kernels import api
from rsembed.kernels.contract import Call, IdList
from rsembed.row_gradients import check_gradient
from rsembed.sok import lookups
from rsembed.sok.lookups import KeysOfBags, StepOnce, WeightsOfKeys
from rsembed.sok.variables import EmbeddingVariable, embedding_variable
from rsembed.specs import Combiner, FeatureSpec, TableSpec

Table = EmbeddingVariable | Float[Array, "rows dim"] | nnx.Variable


def group_embedding_lookup_sparse(
    params: Sequence[Table],
    sp_ids: Sequence[KeysOfBags],
    combiners: Sequence[str],
    partition_strategy: str = "mod",
    sp_weights: Sequence[WeightsOfKeys] | None = None,
    name: str | None = None,
    *,
    training: bool = False,
) -> list[Float[Array, "batch _"]]:
    """Pooled rows of many tables in one exchange.

    Args:
      params: `EmbeddingVariable`s, and plain tables `[rows, dim]` (arrays or `nnx.Param`s, differentiable as usual);
        dims may differ.
      sp_ids: ids for each of them: `Bags`, lists, or an integer array `[batch, ids]` with -1 for none.
      combiners: "sum", "mean" or "sqrtn" for each.
      partition_strategy: "mod", the only one.
      sp_weights: weights for each, or None where there are none.
      name: name of the group, for messages.
      training: new keys of embedding variables read as what their rows are going to start from, else as zeros.

    Returns: `[batch, dim]` of each. Where there are several processes, plain tables must be equal in all of them;
      beside embedding variables they give the samples of all processes, as those do, and alone those of their own.

    Raises:
      ValueError: the lists differ in length, or an entry is wrong; naming group and position.
      NotImplementedError: another partition strategy.
    Source: DeepRec, `tf.nn.group_embedding_lookup_sparse`.
    """
    group = _named(name, partition_strategy)
    return _look_up_group(params, sp_ids, sp_weights, combiners, group, training=training)[0]


def group_embedding_lookup_vjp(
    params: Sequence[EmbeddingVariable],
    sp_ids: Sequence[KeysOfBags],
    combiners: Sequence[str],
    partition_strategy: str = "mod",
    sp_weights: Sequence[WeightsOfKeys] | None = None,
    name: str | None = None,
) -> tuple[list[Float[Array, "batch _"]], Callable[[Sequence[ArrayLike]], None]]:
    """Pooled rows of many tables for training, and `backward(d_outputs)`, which steps the rows that were read.

    Arguments are those of `group_embedding_lookup_sparse`, but `params` are `EmbeddingVariable`s only.

    Raises: as there; TypeError: a plain table, whose gradient `jax.grad` gives.
    """
    group = _named(name, partition_strategy)
    check_type(params, Sequence, f"{group}: params")
    for position, table in enumerate(params):
        if not isinstance(table, EmbeddingVariable):
            raise TypeError(
                f"{group}: params[{position}] is {type(table).__name__}; only EmbeddingVariables train themselves. "
                "Differentiate group_embedding_lookup_sparse with jax.grad for plain tables."
            )
    outputs, backward = _look_up_group(params, sp_ids, sp_weights, combiners, group, training=True)
    return outputs, lambda d_outputs: backward(*d_outputs)


def _named(name: str | None, partition_strategy: str) -> str:
    group = f"group {name or 'embedding'!r}"
    if partition_strategy != "mod":
        raise NotImplementedError(f"{group}: partition_strategy={partition_strategy!r}; rows are placed by 'mod' only.")
    return group


def _look_up_group(
    params: Sequence[Table],
    sp_ids: Sequence[KeysOfBags],
    sp_weights: Sequence[WeightsOfKeys] | None,
    combiners: Sequence[str],
    group: str,
    *,
    training: bool,
) -> tuple[list[Array], StepOnce]:
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"{group}: params must be a list of tables, got {describe(params)}.")
    known = [lookups.checked_combiner(own, f"{group}: combiners[{position}]") for position, own in enumerate(combiners)]
    features, variables, plain = _features_of(params, group)
    context = next((variable.table.context for variable in variables.values()), None)
    devices = Devices() if context is None else context.devices

    def read(given: tuple[Sequence[KeysOfBags], Sequence[WeightsOfKeys] | None]) -> dict[str, Bags]:
        ids, weights = given[0], [None] * len(params) if given[1] is None else list(given[1])
        lengths = {"params": len(params), "sp_ids": len(ids), "combiners": len(known), "sp_weights": len(weights)}
        if len(set(lengths.values())) != 1 or not params:
            raise ValueError(f"{group}: the lists must have one entry per table and not be empty, got {lengths}.")
        bags = {}
        for name, own, own_weights in zip(features, ids, weights, strict=True):
            bags[name] = lookups.key_bags(own, own_weights, name)
            if context is not None and not inputs.is_unknown(bags[name]):
                context.check_batch(bags[name].num_bags, f"{group}, {name}")
        return bags

    batch = inputs.prepare(features, (sp_ids, sp_weights), devices, bounds_check="raise", what=group, read=read)
    pooling = dict(zip(features, known, strict=True))
    keys, own_pooling = [batch[name] for name in variables], [pooling[name] for name in variables]
    found, backward = lookups.look_up_variables(list(variables.values()), keys, own_pooling, training=training)
    outputs = dict(zip(variables, found, strict=True))
    outputs |= {name: _pool(devices, pooling[name], values, batch[name]) for name, values in plain.items()}
    return [outputs[name] for name in features], backward


def _features_of(
    params: Sequence[Table], group: str
) -> tuple[dict[str, FeatureSpec], dict[str, EmbeddingVariable], dict[str, Array]]:
    """By name, the features as which the core reads the ids of a group, its variables, and its plain tables.

    Raises: TypeError or ValueError: a table is none, or variables are on different devices.
    """
    features: dict[str, FeatureSpec] = {}
    variables: dict[str, EmbeddingVariable] = {}
    plain: dict[str, Array] = {}
    for position, table in enumerate(params):
        name = f"params[{position}]"
        if isinstance(table, EmbeddingVariable):
            spec, own = table.table.spec, table.table.context
            name = f"{name} (table {spec.name!r})"
            variables[name] = table
            first_name, first = next(iter(variables.items()))
            if own.devices != (there := first.table.context).devices:
                raise ValueError(
                    f"{group}: {name} lies on the devices {own.mesh.devices.tolist()}, {first_name} on "
                    f"{there.mesh.devices.tolist()}; make them with the same context, or look them up one after the "
                    "other."
                )
        else:
            values = table.get_value() if isinstance(table, nnx.Variable) else table
            check_type(values, Float[Array, "rows dim"], f"{group}, {name}")
            plain[name] = jnp.asarray(values)
            spec = TableSpec(name, *values.shape)
        features[name] = FeatureSpec(name, spec)
    return features, variables, plain


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pool(devices: Devices, combiner: Combiner, values: Array, batch: PyTree) -> Float[Array, "batch dim"]:
    """Pooled rows of a plain table, of which every device has a copy for its samples."""

    def on_device(values: Array, batch: PyTree) -> Array:
        bags = as_bags(batch, feature="samples of this device")
        weights = None if bags.weights is None else jnp.asarray(bags.weights)
        ids = IdList(jnp.asarray(bags.ids), jnp.asarray(bags.offsets), weights)
        return api.lookup((values,), Call.of([ids], [combiner]))[0]

    pooled: Array = devices.on_each(on_device, (PartitionSpec(), devices.split), devices.split)(values, batch)
    return pooled


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingColumn:
    """A feature and the table that its ids are looked up in.

    Attributes:
      feature: its name in the batch.
      variable: the table.
      combiner: "sum", "mean" or "sqrtn".
    """

    feature: str
    variable: EmbeddingVariable
    combiner: Combiner


def group_embedding_column_scope(name: str | None = None) -> contextlib.AbstractContextManager[str]:
    """Scope in which columns are made, as published; `input_layer` looks up all its columns together, of any scope.

    Args:
      name: name of the group.

    Source: DeepRec, `tf.feature_column.group_embedding_column_scope`.

    Example:
      >>> from rsembed import sok
      >>> context = sok.Init()
      >>> with sok.group_embedding_column_scope("item"):
      ...     columns = [sok.embedding_column(f, 4, rows_per_device=50) for f in ("brand", "shop")]
      >>> batch = {"brand": [[2**40, 3]] * 8, "shop": [[5]] * 8}
      >>> sok.input_layer(batch, columns).shape
      (8, 8)
    """
    return contextlib.nullcontext(name or "group")


@validated
def embedding_column(
    feature: str,
    dimension: int,
    combiner: str = "mean",
    **options: Any,
) -> EmbeddingColumn:
    """A column that reads `feature` from a new table of that name; `EmbeddingColumn` makes one of a table there is.

    Args:
      feature: its name in the batch.
      dimension: length of a row.
      combiner: "sum", "mean" or "sqrtn".
      **options: options of `embedding_variable`.

    Raises: ValueError: an argument is out of range. TypeError: one is unknown.
    """
    known = lookups.checked_combiner(combiner, f"column {feature!r}: combiner")
    return EmbeddingColumn(feature, embedding_variable(feature, dimension, **options), known)


def input_layer(features: Mapping[str, KeysOfBags], columns: Sequence[EmbeddingColumn]) -> Float[Array, "batch _"]:
    """Pooled rows of all columns side by side, in their order, in one exchange.

    Args:
      features: ids of every column's feature, or pairs `(ids, weights)`.
      columns: see `embedding_column`.

    Raises: ValueError: a feature is missing.
    """
    return jnp.concatenate(_read_columns(features, columns, training=False)[0], axis=1)


def input_layer_vjp(
    features: Mapping[str, KeysOfBags], columns: Sequence[EmbeddingColumn]
) -> tuple[Float[Array, "batch _"], Callable[[ArrayLike], None]]:
    """`input_layer` for training, and `backward(d_output)`, which steps the rows that were read.

    Raises: ValueError: as `input_layer`, or the gradient has another shape than the output; then nothing has changed.
    """
    outputs, step = _read_columns(features, columns, training=True)
    output = jnp.concatenate(outputs, axis=1)
    splits, shape = np.cumsum([own.shape[1] for own in outputs])[:-1].tolist(), output.shape

    def backward(d_output: ArrayLike) -> None:
        check_gradient(d_output, "input_layer: the gradient")
        if np.shape(d_output) != shape:
            raise ValueError(f"input_layer: the gradient has shape {np.shape(d_output)}, the output {shape}.")
        step(*jnp.split(device_copy(d_output, jnp.float32), splits, axis=1))

    return output, backward


def _read_columns(
    features: Mapping[str, KeysOfBags], columns: Sequence[EmbeddingColumn], *, training: bool
) -> tuple[list[Array], StepOnce]:
    check_type(columns, Sequence, "input_layer: columns")
    for position, column in enumerate(columns):
        check_type(column, EmbeddingColumn, f"input_layer: columns[{position}]")
    check_type(features, Mapping, "input_layer: features")
    missing = [column.feature for column in columns if column.feature not in features]
    if missing or not columns:
        raise ValueError(f"input_layer: features {missing} are missing; the batch has {sorted(features)}.")
    given = [features[column.feature] for column in columns]
    pairs = [value if type(value) is tuple and len(value) == 2 else (value, None) for value in given]
    variables, combiners = [column.variable for column in columns], [column.combiner for column in columns]
    ids, weights = zip(*pairs, strict=True)
    return _look_up_group(variables, ids, weights, combiners, "input_layer", training=training)
