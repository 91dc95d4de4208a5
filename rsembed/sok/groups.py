"""Lookups of many tables at once, as DeepRec offers them: a function over lists, and columns made in a scope."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rsembed.bags import Bags, common_width, device_copy
from rsembed.checks import check_type, describe, validated
from rsembed.parallel import Agreement
from rsembed.row_gradients import check_gradient
from rsembed.sok import plain_tables
from rsembed.sok.initialize import Context
from rsembed.sok.key_bags import KeyBags, bring, checked_combiner, read_keys, widened
from rsembed.sok.lookups import StepOnce, look_up_variables
from rsembed.sok.variables import EmbeddingVariable, embedding_variable
from rsembed.specs import Combiner


def group_embedding_lookup_sparse(
    params: Sequence[Any],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    partition_strategy: str = "mod",
    sp_weights: Sequence[Any] | None = None,
    name: str | None = None,
    *,
    training: bool = False,
) -> list[Float[Array, "batch _"]]:
    """Pooled rows of many tables in one program.

    Args:
      params: `EmbeddingVariable`s, and plain tables `[rows, dim]` (arrays or `nnx.Param`s, differentiable as usual);
        dims may differ.
      sp_ids: ids for each of them: `Bags`, lists, or an integer array `[batch, ids]` with -1 for none.
      combiners: "sum", "mean" or "sqrtn" for each.
      partition_strategy: "mod", the only one.
      sp_weights: weights for each, or None where there are none.
      name: of the group, for messages.
      training: give new keys of embedding variables rows.

    Returns: `[batch, dim]` of each. Where there are several processes, plain tables must be equal in all of them;
      beside embedding variables they give the samples of all processes, as those do, and alone those of their own.

    Raises:
      ValueError: the lists differ in length, or an entry is wrong; naming group and position.
      NotImplementedError: another partition strategy.
    Source: DeepRec, `tf.nn.group_embedding_lookup_sparse`.
    """
    return _look_up_group(params, sp_ids, combiners, partition_strategy, sp_weights, name, training=training)[0]


def group_embedding_lookup_vjp(
    params: Sequence[Any],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    partition_strategy: str = "mod",
    sp_weights: Sequence[Any] | None = None,
    name: str | None = None,
) -> tuple[list[Float[Array, "batch _"]], Callable[[Sequence[Any]], None]]:
    """The same lookup for training, and `backward(d_outputs)`, which steps the rows of the embedding variables.

    Arguments are those of `group_embedding_lookup_sparse`, but `params` are `EmbeddingVariable`s only.

    Raises: as there; TypeError: a plain table, whose gradient `jax.grad` gives.
    """
    for position, table in enumerate(params):
        if not isinstance(table, EmbeddingVariable):
            raise TypeError(
                f"group {name or 'embedding'!r}: params[{position}] is {type(table).__name__}; only EmbeddingVariables "
                "train themselves. Differentiate group_embedding_lookup_sparse with jax.grad for plain tables."
            )
    outputs, backward = _look_up_group(params, sp_ids, combiners, partition_strategy, sp_weights, name, training=True)
    return outputs, lambda d_outputs: backward(*d_outputs)


def _look_up_group(*arguments: Any, training: bool) -> tuple[list[Array], StepOnce]:
    return _read_group(*arguments, training=training)()


def _read_group(
    params: Sequence[Any],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    partition_strategy: str,
    sp_weights: Sequence[Any] | None,
    name: str | None,
    *,
    training: bool,
) -> Callable[[], tuple[list[Array], StepOnce]]:
    """The lookup of a checked batch: training gives new keys their rows, and no table may be ahead of others."""
    group = f"group {name or 'embedding'!r}"
    if partition_strategy != "mod":
        raise NotImplementedError(f"{group}: partition_strategy={partition_strategy!r}; rows are placed by 'mod' only.")
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"{group}: params must be a list of tables, got {describe(params)}.")
    known = [checked_combiner(own, f"{group}: combiners[{position}]") for position, own in enumerate(combiners)]
    context = _context_of(params, group)
    # Where several processes have samples, all outputs are those of the global batch.
    shared = context if context is not None and context.num_local_devices < context.num_devices else None
    plain: dict[int, Bags] = {}
    batch: dict[int, KeyBags] = {}
    with Agreement(None if shared is None else shared.mesh, group, (sp_ids, sp_weights)) as agreement:
        weights = [None] * len(params) if sp_weights is None else list(sp_weights)
        lengths = {"params": len(params), "sp_ids": len(sp_ids), "combiners": len(known), "sp_weights": len(weights)}
        if len(set(lengths.values())) != 1 or not params:
            raise ValueError(f"{group}: the lists must have one entry per table and not be empty, got {lengths}.")
        for i, (table, ids, own, combiner) in enumerate(zip(params, sp_ids, weights, known, strict=True)):
            if not isinstance(table, EmbeddingVariable):
                plain[i] = plain_tables.read_ids(table, ids, own, f"{group}, params[{i}]")
                if shared is not None and plain_tables.is_own(plain[i]):
                    shared.check_batch(plain[i].num_bags, f"{group}, params[{i}]")
                    width = common_width(plain[i])
                    agreement.bring(_name(i, table), f"{plain[i].num_bags} samples", width=width)
                continue
            batch[i] = read_keys(table.table, ids, own, combiner)
            bring(agreement, _name(i, table), batch[i], table.table.context, f"{group}, {table.table.spec.name!r}")

    def look_up() -> tuple[list[Array], StepOnce]:
        outputs: dict[int, Array] = {}
        for i, bags in plain.items():
            if shared is not None and plain_tables.is_own(bags):
                width = agreement.width(_name(i, params[i]))
                outputs[i] = plain_tables.pool_everywhere(params[i], bags, known[i], context=shared, width=width)
            else:
                outputs[i] = plain_tables.pool(params[i], bags, known[i])
        keys = [widened(bags, agreement.width(_name(i, params[i]))) for i, bags in batch.items()]
        found, backward = look_up_variables([params[i] for i in batch], keys, training=training)
        outputs |= dict(zip(batch, found, strict=True))
        return [outputs[i] for i in range(len(params))], backward

    return look_up


def _context_of(params: Sequence[Any], group: str) -> Context | None:
    """The devices of a group's embedding variables; None if it has none. Raises: ValueError: they differ."""
    tables = [table.table for table in params if isinstance(table, EmbeddingVariable)]
    for table in tables:
        first, own = tables[0].context, table.context
        if (own.mesh, own.axis) != (first.mesh, first.axis):
            raise ValueError(
                f"{group}: table {table.spec.name!r} lies on the devices {own.mesh.devices.tolist()} (axis "
                f"{own.axis!r}), table {tables[0].spec.name!r} on {first.mesh.devices.tolist()} (axis {first.axis!r}); "
                "make them with the same context, or look them up one after the other."
            )
    return tables[0].context if tables else None


def _name(position: int, table: Any) -> str:
    name = f" (table {table.table.spec.name!r})" if isinstance(table, EmbeddingVariable) else ""
    return f"params[{position}]{name}"


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingColumn:
    """A feature and the table that it is read from.

    Attributes:
      feature: its name in the batch.
      variable: the table.
      combiner: "sum", "mean" or "sqrtn".
      group: name of the scope in which the column was made, None outside.
    """

    feature: str
    variable: EmbeddingVariable
    combiner: Combiner
    group: str | None


_open_scopes: list[str] = []


@contextlib.contextmanager
def group_embedding_column_scope(name: str | None = None) -> Iterator[str]:
    """Columns made inside belong to one group, which `input_layer` looks up in one program.

    Args:
      name: of the group.

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
    _open_scopes.append(name or "group")
    try:
        yield _open_scopes[-1]
    finally:
        _open_scopes.pop()


@validated
def embedding_column(
    feature: str,
    dimension: int,
    combiner: str = "mean",
    *,
    variable: EmbeddingVariable | None = None,
    **options: Any,
) -> EmbeddingColumn:
    """A column that reads `feature` from a table.

    Args:
      feature: its name in the batch.
      dimension: length of a row.
      combiner: "sum", "mean" or "sqrtn".
      variable: a table to share; None makes one with the feature's name.
      **options: for `embedding_variable`.

    Raises: ValueError: an argument is out of range, or the shared table has other rows. TypeError: one is unknown.
    """
    known = checked_combiner(combiner, f"column {feature!r}: combiner")
    if variable is None:
        variable = embedding_variable(feature, dimension, **options)
    elif options:
        raise TypeError(f"column {feature!r}: {', '.join(options)} would make a table, but variable= shares one.")
    elif variable.table.spec.embedding_dim != dimension:
        raise ValueError(
            f"column {feature!r}: dimension={dimension}, but the shared table has rows of "
            f"{variable.table.spec.embedding_dim}."
        )
    group = _open_scopes[-1] if _open_scopes else None
    return EmbeddingColumn(feature, variable, known, group)


def input_layer(features: Mapping[str, Any], columns: Sequence[EmbeddingColumn]) -> Float[Array, "batch _"]:
    """Pooled rows of all columns side by side, in their order; each group is one program.

    Args:
      features: ids of every column's feature, or pairs `(ids, weights)`.
      columns: see `embedding_column`.

    Raises: ValueError: a feature is missing.
    """
    return jnp.concatenate(_read_columns(features, columns, training=False)[0], axis=1)


def input_layer_vjp(
    features: Mapping[str, Any], columns: Sequence[EmbeddingColumn]
) -> tuple[Float[Array, "batch _"], Callable[[Any], None]]:
    """`input_layer` for training, and `backward(d_output)`, which steps the rows that were read.

    Raises: ValueError: as `input_layer`, or the gradient has another shape than the output; then nothing has changed.
    """
    outputs, backwards = _read_columns(features, columns, training=True)
    splits = np.cumsum([output.shape[1] for output in outputs])[:-1].tolist()
    shape = (outputs[0].shape[0], sum(output.shape[1] for output in outputs))

    def backward(d_output: Any) -> None:
        check_gradient(d_output, "input_layer: the gradient")
        if np.shape(d_output) != shape:  # all groups step, or none
            raise ValueError(f"input_layer: the gradient has shape {np.shape(d_output)}, the output {shape}.")
        pieces = jnp.split(device_copy(d_output, jnp.float32), splits, axis=1)
        for positions, step in backwards:
            step(*[pieces[position] for position in positions])

    return jnp.concatenate(outputs, axis=1), backward


def _read_columns(
    features: Mapping[str, Any], columns: Sequence[EmbeddingColumn], *, training: bool
) -> tuple[list[Array], list[tuple[list[int], StepOnce]]]:
    for position, column in enumerate(columns):
        check_type(column, EmbeddingColumn, f"input_layer: columns[{position}]")
    check_type(features, Mapping, "input_layer: features")
    missing = [column.feature for column in columns if column.feature not in features]
    if missing or not columns:
        raise ValueError(f"input_layer: features {missing} are missing; the batch has {sorted(features)}.")
    groups: dict[Any, list[int]] = {}
    homes: dict[int, Any] = {}  # columns of one table are one group, or it would be stepped once for each of them
    for position, column in enumerate(columns):
        home = homes.setdefault(id(column.variable), column.group or position)
        groups.setdefault(home, []).append(position)
    read = []
    for group, positions in groups.items():
        own = [columns[position] for position in positions]
        given = [features[column.feature] for column in own]
        pairs = [value if type(value) is tuple and len(value) == 2 else (value, None) for value in given]
        ids, weights = zip(*pairs, strict=True)
        variables, combiners = [column.variable for column in own], [column.combiner for column in own]
        look_up = _read_group(variables, ids, combiners, "mod", weights, str(group), training=training)
        read.append((positions, look_up))
    outputs: dict[int, Array] = {}
    backwards = []
    for positions, look_up in read:
        found, backward = look_up()
        outputs |= dict(zip(positions, found, strict=True))
        backwards.append((positions, backward))
    return [outputs[position] for position in range(len(columns))], backwards
