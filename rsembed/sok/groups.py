"""DeepRec's group lookups: one call looks up many tables, for lists of ids or feature columns."""

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
from jaxtyping import Array, Float

from rsembed.arrays import device_copy
from rsembed.bags import Bags, as_bags
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
"""An `EmbeddingVariable`, which has an optimizer, or a plain table for `jax.grad`."""


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
    """Pooled rows of many tables, which are looked up together.

    In a run of several processes, plain tables must be equal in all processes. If `params` contains
    an `EmbeddingVariable`, every output has one row for each sample of all processes. If all tables
    are plain, every output has one row for each sample of this process.

    Args:
      params: one table per output, of any dim: `EmbeddingVariable`s, or plain tables `[rows, dim]`
        (arrays or `nnx.Param`s, which `jax.grad` differentiates).
      sp_ids: ids for each table, as `Bags`, lists, or an integer array `[batch, ids]` with padding
        -1.
      combiners: "sum", "mean" or "sqrtn" for each table.
      partition_strategy: "mod", the only supported value.
      sp_weights: weights for each table, with None for a table without weights.
      name: name of the group in error messages.
      training: if True, the lookup returns the initial row for a new key of an embedding variable.
        If False, the lookup returns zeros for a key without a row.

    Returns: one array `[batch, dim]` per table, in the order of `params`.

    Raises:
      ValueError: the lists differ in length, or an entry is invalid. The error message contains
        the name of the group and the position of the invalid entry.
      NotImplementedError: `partition_strategy` is not "mod".

    Source: DeepRec, `tf.nn.group_embedding_lookup_sparse`.
    """
    group = _checked_group(params, name, partition_strategy)
    outputs, _ = _look_up_group(params, sp_ids, sp_weights, combiners, group, training=training)
    return outputs


def group_embedding_lookup_vjp(
    params: Sequence[EmbeddingVariable],
    sp_ids: Sequence[KeysOfBags],
    combiners: Sequence[str],
    partition_strategy: str = "mod",
    sp_weights: Sequence[WeightsOfKeys] | None = None,
    name: str | None = None,
) -> tuple[list[Float[Array, "batch _"]], Callable[[Sequence[ArrayLike]], None]]:
    """Pooled rows of many tables for training, and `backward(d_outputs)`, which updates the rows.

    `group_embedding_lookup_sparse` describes the arguments. All `params` must be
    `EmbeddingVariable`s.

    Raises:
      TypeError: a table is a plain array (use `jax.grad`).
      ValueError, NotImplementedError: see `group_embedding_lookup_sparse`.
    """
    group = _checked_group(params, name, partition_strategy)
    for position, table in enumerate(params):
        if not isinstance(table, EmbeddingVariable):
            raise TypeError(
                f"{group}: params[{position}] is {type(table).__name__}; only EmbeddingVariables "
                "train themselves. Differentiate group_embedding_lookup_sparse with jax.grad for "
                "plain tables."
            )
    outputs, step = _look_up_group(params, sp_ids, sp_weights, combiners, group, training=True)

    def backward(d_outputs: Sequence[ArrayLike]) -> None:
        step(*d_outputs)

    return outputs, backward


def _checked_group(params: object, name: str | None, partition_strategy: str) -> str:
    """Checks the list of tables and the partition strategy, and returns the group's full name."""
    group = f"group {name or 'embedding'!r}"
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"{group}: params must be a list of tables, got {describe(params)}.")
    if partition_strategy != "mod":
        problem = f"partition_strategy={partition_strategy!r}"
        raise NotImplementedError(f"{group}: {problem}; rows are placed by 'mod' only.")
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
    known_combiners: list[Combiner] = []
    for position, combiner in enumerate(combiners):
        known_combiners.append(
            lookups.checked_combiner(combiner, f"{group}: combiners[{position}]"),
        )
    features, variables, plain_tables = _features_of(params, group)
    context = None
    devices = Devices()
    if variables:
        first_variable = next(iter(variables.values()))
        context = first_variable.table.context
        devices = context.devices

    def read(batch: tuple[Sequence[KeysOfBags], Sequence[WeightsOfKeys] | None]) -> dict[str, Bags]:
        ids, weights = batch
        weights = [None] * len(params) if weights is None else list(weights)
        lengths = {
            "params": len(params),
            "sp_ids": len(ids),
            "combiners": len(known_combiners),
            "sp_weights": len(weights),
        }
        if len(set(lengths.values())) != 1 or not params:
            needed = "the lists must have one entry per table and not be empty"
            raise ValueError(f"{group}: {needed}, got {lengths}.")
        bags = {}
        for name, table_ids, table_weights in zip(features, ids, weights, strict=True):
            bags[name] = lookups.key_bags(table_ids, table_weights, name)
            if context is not None and not inputs.is_unknown(bags[name]):
                context.check_batch(bags[name].num_bags, f"{group}, {name}")
        return bags

    batch = inputs.prepare(
        features,
        (sp_ids, sp_weights),
        devices,
        bounds_check="raise",
        what=group,
        read=read,
    )
    combiner_of = dict(zip(features, known_combiners, strict=True))
    pooled, backward = lookups.look_up_variables(
        list(variables.values()),
        [batch[name] for name in variables],
        [combiner_of[name] for name in variables],
        training=training,
    )
    outputs = dict(zip(variables, pooled, strict=True))
    for name, values in plain_tables.items():
        outputs[name] = _pool(devices, combiner_of[name], values, batch[name])
    return [outputs[name] for name in features], backward


def _features_of(
    params: Sequence[Table],
    group: str,
) -> tuple[dict[str, FeatureSpec], dict[str, EmbeddingVariable], dict[str, Array]]:
    """Feature specs, embedding variables and plain tables of a group, by name.

    The name of a table contains the position of the table in `params`, such as "params[0]".

    Raises:
      TypeError: an entry of `params` is not a table.
      ValueError: the embedding variables are on different devices.
    """
    features: dict[str, FeatureSpec] = {}
    variables: dict[str, EmbeddingVariable] = {}
    plain_tables: dict[str, Array] = {}
    for position, table in enumerate(params):
        name = f"params[{position}]"
        if isinstance(table, EmbeddingVariable):
            spec = table.table.spec
            name = f"{name} (table {spec.name!r})"
            variables[name] = table
            first_name, first = next(iter(variables.items()))
            context = table.table.context
            first_context = first.table.context
            if context.devices != first_context.devices:
                raise ValueError(
                    f"{group}: {name} lies on the devices {context.mesh.devices.tolist()}, "
                    f"{first_name} on {first_context.mesh.devices.tolist()}; make them with the "
                    "same context, or look them up one after the other."
                )
        else:
            values = table.get_value() if isinstance(table, nnx.Variable) else table
            check_type(values, Float[Array, "rows dim"], f"{group}, {name}")
            plain_tables[name] = jnp.asarray(values)
            spec = TableSpec(name, *values.shape)
        features[name] = FeatureSpec(name, spec)
    return features, variables, plain_tables


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pool(
    devices: Devices,
    combiner: Combiner,
    values: Array,
    batch: lookups.KeysOfFeature,
) -> Float[Array, "batch dim"]:
    """Pooled rows of a table that is a plain array.

    Every device gets a copy of the plain table, and computes the outputs of a part of the samples.
    """

    def on_device(values: Array, batch: lookups.KeysOfFeature) -> Array:
        bags = as_bags(batch, feature="samples of this device")
        weights = None if bags.weights is None else jnp.asarray(bags.weights)
        ids = IdList(jnp.asarray(bags.ids), jnp.asarray(bags.offsets), weights)
        return api.lookup((values,), Call.of([ids], [combiner]))[0]

    pool = devices.on_each(on_device, (PartitionSpec(), devices.split), devices.split)
    pooled: Array = pool(values, batch)
    return pooled


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingColumn:
    """A feature, and the table in which the ids of the feature are looked up.

    Attributes:
      feature: name of the feature in the batch.
      variable: table that the feature reads.
      combiner: "sum", "mean" or "sqrtn".
    """

    feature: str
    variable: EmbeddingVariable
    combiner: Combiner


def group_embedding_column_scope(name: str | None = None) -> contextlib.AbstractContextManager[str]:
    """Context manager that yields the name of a group of feature columns, as in DeepRec.

    The group does not change lookups, because `input_layer` always looks up all feature columns in
    one call.

    Args:
      name: name of the group, by default "group".

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
    """A feature column that looks up the ids of `feature` in a new table of the same name.

    For a feature column that reads an existing table, call `EmbeddingColumn` directly.

    Args:
      feature: name of the feature in the batch, which is also the name of the new table.
      dimension: number of columns of the table.
      combiner: "sum", "mean" or "sqrtn".
      **options: options of `embedding_variable`.

    Raises:
      ValueError: an argument is out of range.
      TypeError: an argument is unknown.
    """
    known = lookups.checked_combiner(combiner, f"column {feature!r}: combiner")
    return EmbeddingColumn(feature, embedding_variable(feature, dimension, **options), known)


def input_layer(
    features: Mapping[str, KeysOfBags],
    columns: Sequence[EmbeddingColumn],
) -> Float[Array, "batch _"]:
    """Pooled rows of all feature columns, concatenated in the order of `columns`.

    Args:
      features: ids, or a pair `(ids, weights)`, for each feature, by feature name.
      columns: results of `embedding_column`.

    Raises: ValueError: a feature is missing.
    """
    outputs, _ = _read_columns(features, columns, training=False)
    return jnp.concatenate(outputs, axis=1)


def input_layer_vjp(
    features: Mapping[str, KeysOfBags],
    columns: Sequence[EmbeddingColumn],
) -> tuple[Float[Array, "batch _"], Callable[[ArrayLike], None]]:
    """Output of `input_layer` for training, and `backward(d_output)`, which updates the rows.

    Raises: ValueError: see `input_layer`. If the gradient does not have the shape of the output,
      `backward` raises ValueError, and changes no table.
    """
    outputs, step = _read_columns(features, columns, training=True)
    output = jnp.concatenate(outputs, axis=1)
    shape = output.shape
    widths = [column_output.shape[1] for column_output in outputs]
    splits = np.cumsum(widths)[:-1].tolist()

    def backward(d_output: ArrayLike) -> None:
        check_gradient(d_output, "input_layer: the gradient")
        if np.shape(d_output) != shape:
            problem = f"the gradient has shape {np.shape(d_output)}, the output {shape}"
            raise ValueError(f"input_layer: {problem}.")
        gradient = device_copy(d_output, jnp.float32)
        step(*jnp.split(gradient, splits, axis=1))

    return output, backward


def _read_columns(
    features: Mapping[str, KeysOfBags],
    columns: Sequence[EmbeddingColumn],
    *,
    training: bool,
) -> tuple[list[Array], StepOnce]:
    check_type(columns, Sequence, "input_layer: columns")
    for position, column in enumerate(columns):
        check_type(column, EmbeddingColumn, f"input_layer: columns[{position}]")
    check_type(features, Mapping, "input_layer: features")
    missing = [column.feature for column in columns if column.feature not in features]
    if missing or not columns:
        present = f"the batch has {sorted(features)}"
        raise ValueError(f"input_layer: features {missing} are missing; {present}.")
    ids: list[Any] = []
    weights: list[Any] = []
    for column in columns:
        value = features[column.feature]
        if type(value) is tuple and len(value) == 2:
            feature_ids, feature_weights = value
        else:
            feature_ids, feature_weights = value, None
        ids.append(feature_ids)
        weights.append(feature_weights)
    variables = [column.variable for column in columns]
    combiners = [column.combiner for column in columns]
    return _look_up_group(
        variables,
        tuple(ids),
        tuple(weights),
        combiners,
        "input_layer",
        training=training,
    )
