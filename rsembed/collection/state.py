"""The state of a collection, and the statistics of a lookup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed.fingerprint import Fingerprint

Activations = dict[str, Float[Array, "..."]]
Batch = Mapping[str, PyTree]
ByName = dict[str, PyTree]
"""Trees by the name of a table, a stack or a feature."""


class EmbeddingState(NamedTuple):
    """Everything that training changes; donate it to your step.

    Args:
      tables: one array `[rows, dim]` per stack, or what the storage of its tables keeps instead. On a mesh, rows lie
        shard after shard; `EmbeddingCollection.tables` brings them into logical order.
      slots: optimizer state beside each table.
      step: number of updates so far.
      key: randomness of stochastic rounding; unused otherwise.
      layout: which row of which table, with which rule, every row of the arrays is: `RowLayout.facts` by stack. Files
        are written by it, and a collection compares it with its own. None, in a state made by hand, is not compared.
    """

    tables: ByName
    slots: ByName
    step: Int[Array, ""]
    key: PRNGKeyArray
    layout: Fingerprint | None = None


class Traffic(NamedTuple):
    """Rounds and bytes that a lookup of one stack exchanged with other devices.

    Args:
      num_rounds: rounds of `all_to_all`; 0 where nothing is asked.
      num_bytes: bytes that every device sent, padding included.
      num_unknown: of tables with keys, distinct ones without a row, by device that looked for them; else None. Ahead
        of a step, those that it is going to give a row.
    """

    num_rounds: Int[Array, ""]
    num_bytes: Float[Array, ""]
    num_unknown: Int[Array, " devices"] | None = None

    @staticmethod
    def of(num_rounds: int | Int[Array, ""], bytes_per_round: int) -> Traffic:
        """Equal rounds. Bytes are floats, since int32 ends at 2 GiB."""
        rounds = jnp.asarray(num_rounds, jnp.int32)
        return Traffic(rounds, rounds.astype(jnp.float32) * bytes_per_round)


class LookupStatistics(NamedTuple):
    """Ids and traffic of one lookup, over the global batch.

    Args:
      num_ids: ids that contributed, per feature.
      num_out_of_range: ids outside their table, which contributed nothing, per feature.
      traffic: per stack.
    """

    num_ids: dict[str, Int[Array, ""]]
    num_out_of_range: dict[str, Int[Array, ""]]
    traffic: dict[str, Traffic]
