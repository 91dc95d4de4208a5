"""What variables and preprocessed batches belong to: fingerprints of the places that specs were given.

Four devices or eight, another rotation, another order of tables: arrays have the same shapes, and rows other places.
Variables and batches therefore carry the layout that they were made for; whoever is given some compares it here with
the specs. Arrays that users put together themselves carry None, and only their shapes are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rsembed.fingerprint import Fingerprint, check_same
from rsembed.optimizers import OptimizerSpec
from rsembed.sparsecore.layout import StackLayout, placed_stack
from rsembed.sparsecore.variables import EmbeddingVariables
from rsembed.specs import TableSpec

_OTHER_LAYOUT = (
    "Use the specs that they were made for, or move tables between layouts by name, with logical_variables and "
    "with_logical_tables."
)


def variables_fingerprint(tables: Sequence[TableSpec]) -> Fingerprint:
    """Where the rows of a stack lie, and whose state the slots are."""
    return Fingerprint.of(_places(tables) | {"optimizer": placed_stack(tables[0]).optimizer.identity})


def logical_fingerprint(optimizer: OptimizerSpec) -> Fingerprint:
    """Whose state the slots of one table in its logical form are; its rows lie in order."""
    return Fingerprint.of({"optimizer": optimizer.identity})


def logical_of(tree: Any) -> Fingerprint | None:
    """The logical form of a stack's variables, as far as they tell."""
    if not isinstance(tree, EmbeddingVariables) or tree.layout is None:
        return None
    return Fingerprint.of({"optimizer": tree.layout.facts["optimizer"]})


def labelled(tree: Any, layout: Fingerprint | None) -> Any:
    """Variables with another layout; any other tree as it is."""
    return EmbeddingVariables(*tree, layout=layout) if isinstance(tree, EmbeddingVariables) else tree


def check_logical(tree: Any, optimizer: OptimizerSpec, *, where: str) -> None:
    """Raises: ValueError: these are variables of one table, but of another optimizer, or not in their logical form."""
    if isinstance(tree, EmbeddingVariables) and tree.layout is not None:
        what = f"{where}: its variables were made for another optimizer or layout"
        check_same(tree.layout, logical_fingerprint(optimizer), what=what, way_out=_OTHER_LAYOUT)


def batch_fingerprint(layouts: Mapping[str, StackLayout]) -> Fingerprint:
    """Where the rows of all stacks lie, and the samples of all features; limits may change from batch to batch."""
    facts = {}
    for name, layout in layouts.items():
        features = {
            feature.name: {
                "table": feature.table_spec.name,
                "first_sample": feature.id_transformation.row_offset,
                "samples": feature.num_samples,
            }
            for feature in layout.features
        }
        facts[name] = _places(layout.tables) | {"features": features, "combiner": layout.spec.combiner}
    return Fingerprint.of(facts)


def _places(tables: Sequence[TableSpec]) -> dict[str, Any]:
    stack = placed_stack(tables[0])
    places = {
        table.name: {
            "rows": table.vocabulary_size,
            "dim": table.embedding_dim,
            "first_row_in_shard": table.setting_in_stack.row_offset_in_shard,
            "rotation": table.setting_in_stack.shard_rotation,
        }
        for table in tables
    }
    return {
        "shards": stack.num_shards,
        "rows": stack.stack_vocab_size,
        "columns": stack.stack_embedding_dim,
        "tables": places,
    }


def check_batch(found: Fingerprint | None, layouts: Mapping[str, StackLayout]) -> None:
    """Raises: ValueError: a batch was preprocessed for other places than those of the specs."""
    if found is not None:
        check_same(
            found,
            batch_fingerprint(layouts),
            what="the input was preprocessed for other specs",
            way_out="Preprocess it with the feature specs that are given here.",
        )


def check_rows(tree: Any, tables: Sequence[TableSpec], *, is_any_optimizer: bool = True) -> None:
    """Raises: ValueError: these are variables of a stack whose rows lie elsewhere, or are stepped by another rule."""
    if not isinstance(tree, EmbeddingVariables) or tree.layout is None:
        return
    expected = variables_fingerprint(tables).facts
    if is_any_optimizer:
        expected["optimizer"] = tree.layout.facts["optimizer"]
    what = f"variables of stack {placed_stack(tables[0]).stack_name!r} were made for other specs"
    check_same(tree.layout, Fingerprint.of(expected), what=what, way_out=_OTHER_LAYOUT)


def check_variables(
    variables: EmbeddingVariables, tables: Sequence[TableSpec], *, num_parts: int = 1, rule: OptimizerSpec | None = None
) -> None:
    """Raises: ValueError: variables are not those of a stack, as far as one can tell.

    Args:
      variables: of the whole stack, or of one of `num_parts` devices.
      tables: all tables of the stack.
      num_parts: parts into which rows are cut.
      rule: what is going to step the rows; None leaves the slots alone.
    """
    stack = placed_stack(tables[0])
    check_rows(variables, tables, is_any_optimizer=rule is None)
    shape = (stack.stack_vocab_size // num_parts, stack.stack_embedding_dim)
    if variables.table.shape != shape:
        raise ValueError(
            f"stack {stack.stack_name!r} has shape {variables.table.shape}, but the specs say {shape}"
            f"{f' on each of {num_parts} devices' if num_parts > 1 else ''}; were they placed for another number of "
            "devices or cores?"
        )
    if rule is not None:
        check_slots(variables.slot, rule, shape, where=f"stack {stack.stack_name!r}")


def check_slots(slot: Any, rule: OptimizerSpec, shape: tuple[int, int], *, where: str) -> None:
    """Raises: ValueError: slots are not those that a rule keeps beside a table of that shape."""
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    expected = jax.eval_shape(lambda rows: rule.pack_slots(rule.init_slots(rows)), rows)
    found, wanted = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (slot, expected))
    structure: Any = jax.tree.structure(expected)
    is_named = type(slot) is not tuple  # a plain tuple tells nothing but its length
    if found != wanted or (is_named and structure != jax.tree.structure(slot)):
        raise ValueError(
            f"{where}: its optimizer {rule.short_name()!r} keeps slots {type(expected).__name__} of shapes {wanted}, "
            f"but got {type(slot).__name__} of shapes {found}; use variables of this optimizer, or its init_slots."
        )
