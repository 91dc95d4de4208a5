"""What the kernels exchange: one record per feature, plain arrays for everything else."""

from __future__ import annotations

import dataclasses
from typing import no_type_check

import jax
from jaxtyping import Array, Float, Int

from rsembed.specs import Combiner

# Row number that no table has. Sorts behind every real row, so padding gathers at the end.
NO_ROW = 2**31 - 1


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """The share of one feature in a kernel call.

    Args:
      rows: table row of every entry. A row outside `[0, num_rows)` contributes nothing and is not counted.
      offsets: entries `offsets[b] : offsets[b + 1]` belong to bag `b`; entries behind the last offset are ignored.
        None with combiner "none", where every entry is a bag.
      weights: weight of every entry; None means ones.
      combiner: `sum` adds `weight * row`; `mean` divides by the sum of weights, `sqrtn` by the root of the sum of
        squared weights (of entries with a valid row; a zero divisor gives zeros); `none` returns every entry by itself.
    """

    rows: Int[Array, " nnz"]
    offsets: Int[Array, " bags_plus_1"] | None
    weights: Float[Array, " nnz"] | None
    combiner: Combiner = dataclasses.field(default="sum", metadata={"static": True})

    def __post_init__(self) -> None:
        if (self.offsets is None) != (self.combiner == "none"):
            raise ValueError(
                f"combiner {self.combiner!r} and offsets do not go together: `none`, and only it, has none."
            )

    @property
    def num_outputs(self) -> int:
        """Rows of this segment's output: bags, or entries for combiner "none"."""
        return self.rows.shape[0] if self.offsets is None else self.offsets.shape[0] - 1
