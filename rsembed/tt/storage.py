"""A tensor train as what a table of the core is made of: `TableSpec(..., storage=TensorTrain(...))`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed import specs
from rsembed.bags import is_traced
from rsembed.checks import check_type
from rsembed.initial_values import table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, SegmentGradients, Step
from rsembed.keys import Keys
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import as_dtype
from rsembed.storage.protocol import ReadAhead, Storage, on_host
from rsembed.tt.chain import Cores
from rsembed.tt.cores import rows as rows_of
from rsembed.tt.decomposition import nearest_cores
from rsembed.tt.fused import init_core_slots, step_cores
from rsembed.tt.initial_cores import WEIGHT_DISTRIBUTIONS, init_cores
from rsembed.tt.spec import TTSpec


@no_type_check  # sequences become tuples in __post_init__
@dataclasses.dataclass(frozen=True)
class TensorTrain(Storage):
    """Keeps a table as tensor-train cores, at a small part of its bytes.

    A row is made when it is looked up. Its gradient is spread over one slice per core, and the table's optimizer steps
    the cores, a slice being what a row is for a dense table. All slices are stepped: an optimizer with moments moves
    slices that no id named, too.

    Args:
      tt_ranks: inner ranks, one fewer than cores; None takes what `bytes` affords.
      tt_p_shapes: row factors; None suggests them.
      tt_q_shapes: column factors; None suggests them.
      bytes: budget of the cores, instead of ranks and factors; see `TTSpec.for_budget`.
      weight_dist: distribution of the initial table, see `init_cores`. The table's own initializer has no effect.

    Raises: ValueError: neither or both of ranks and bytes are given, or the distribution is unknown.

    Example:
      >>> import jax, rsembed as rs
      >>> from rsembed.tt import TensorTrain
      >>> table = rs.TableSpec(name="item", vocabulary_size=10_000, embedding_dim=16, storage=TensorTrain((8, 8)))
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="history", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> collection.lookup(state, {"history": [[17, 4], [9_999]]})["history"].shape
      (2, 16)
    """

    tt_ranks: tuple[int, ...] | None = None
    tt_p_shapes: tuple[int, ...] | None = None
    tt_q_shapes: tuple[int, ...] | None = None
    bytes: int | None = None
    weight_dist: str = "normal"
    sums_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("tt_ranks", "tt_p_shapes", "tt_q_shapes"):
            value = getattr(self, name)
            check_type(value, tuple[int, ...] | None, f"TensorTrain: {name}")
            object.__setattr__(self, name, None if value is None else tuple(value))
        if (self.tt_ranks is None) == (self.bytes is None):
            raise ValueError("TensorTrain needs either tt_ranks or bytes.")
        if self.bytes is not None and (self.tt_p_shapes or self.tt_q_shapes):
            raise ValueError("TensorTrain: bytes chooses the factors too; leave tt_p_shapes and tt_q_shapes out.")
        if self.weight_dist not in WEIGHT_DISTRIBUTIONS:
            known = ", ".join(WEIGHT_DISTRIBUTIONS)
            raise ValueError(f"TensorTrain: unknown weight_dist {self.weight_dist!r}; choose one of {known}.")

    def spec_of(self, table: TableSpec) -> TTSpec:
        """The train that keeps `table`."""
        size = table.vocabulary_size, table.embedding_dim
        if self.tt_ranks is None:
            return TTSpec.for_budget(*size, bytes=self.bytes, dtype=table.dtype)
        return TTSpec.suggest(*size, self.tt_ranks, self.tt_p_shapes, self.tt_q_shapes)

    def resolved(self, table: TableSpec) -> TensorTrain:
        """Ranks and factors said, however they were chosen; how cores were drawn no longer matters."""
        spec = self.spec_of(table)
        return TensorTrain(spec.tt_ranks, spec.tt_p_shapes, spec.tt_q_shapes)

    def check(self, table: TableSpec) -> None:
        """Raises: ValueError: the factors do not fit the table, or it asks for what trains of cores cannot do."""
        if table.dtype == "float16" or table.stochastic_rounding:
            raise ValueError(
                f"table {table.name!r}: TensorTrain keeps float32 or bfloat16 cores, rounded to nearest; got dtype "
                f"{table.dtype!r} and stochastic_rounding={table.stochastic_rounding}."
            )
        if table.initializer is not specs.default_initializer:
            logging.getLogger("rsembed").warning(
                "table %r: its initializer has no effect: TensorTrain draws cores by weight_dist=%r. Give a whole "
                "table to collection.with_tables for the train closest to it.",
                table.name,
                self.weight_dist,
            )
        try:
            self.spec_of(table)
        except ValueError as error:
            raise ValueError(f"table {table.name!r}: {error}") from error

    def init(
        self, key: PRNGKeyArray, table: TableSpec, *, shard: Int[Array, ""], num_shards: int
    ) -> tuple[Cores, tuple[Any, ...]]:
        """Random cores, and the slots of each."""
        del shard, num_shards
        cores = init_cores(table_key(key, table.name), self.spec_of(table), self.weight_dist, dtype=table.dtype)
        return cores, init_core_slots(table.optimizer, cores)

    def read(
        self, params: Cores, keys: Keys, table: TableSpec, *, ahead: ReadAhead | None = None
    ) -> tuple[Float[Array, "nnz dim"], Int[Array, ""]]:
        """Rows, float32, made of their slices."""
        del ahead
        return self.vectors(params, _rows(keys), table), jnp.zeros((), jnp.int32)

    def vectors(self, params: Cores, rows: Int[Array, " nnz"], table: TableSpec) -> Float[Array, "nnz dim"]:
        """Rows, float32, made of their slices."""
        return rows_of(self.spec_of(table), params, rows)

    def find(
        self, params: Any, slots: Any, keys: Keys, table: TableSpec, *, occurrences: Int[Array, " nnz"], step: Step
    ) -> tuple[Any, Any, Int[Array, " nnz"]]:
        """Every row is there."""
        del table, occurrences, step
        return params, slots, _rows(keys)

    def step(
        self,
        params: Cores,
        slots: tuple[Any, ...],
        segments: Sequence[Segment],
        d_outputs: Sequence[Float[Array, "_ dim"]],
        table: TableSpec,
        *,
        step: Step,
    ) -> tuple[Cores, tuple[Any, ...]]:
        """One step of all cores with the gradients of rows, pulled back."""
        return self.step_all(params, slots, self.gradients(params, segments, d_outputs, table), table, step=step)

    def gradients(
        self, params: Cores, segments: Sequence[Segment], d_outputs: Sequence[Float[Array, "_ dim"]], table: TableSpec
    ) -> Cores:
        """Those of all cores: each distinct row of the segments is pulled back once."""
        rows, gradients = api.row_gradients(table.vocabulary_size, SegmentGradients(segments, d_outputs))
        # Of cores in float32, so that nothing is rounded before it is summed.
        cores = tuple(core.astype(jnp.float32) for core in params)
        _, pull = jax.vjp(lambda cores: rows_of(self.spec_of(table), cores, rows), cores)
        (d_cores,) = pull(gradients)
        return tuple(d_cores)

    def step_all(
        self, params: Cores, slots: tuple[Any, ...], gradients: Cores, table: TableSpec, *, step: Step
    ) -> tuple[Cores, tuple[Any, ...]]:
        """One step of all cores."""
        d_cores = [gradient.astype(core.dtype) for gradient, core in zip(gradients, params, strict=True)]
        return step_cores(table.optimizer, params, slots, d_cores, step.hyper)

    def with_rows(
        self, params: Cores, slots: Any, rows: Any, table: TableSpec, num_shards: int, *, step: int | None = None
    ) -> tuple[Any, Any]:
        """Cores in a tuple, or in a dictionary as files have them, or those closest to a whole table; slots stay.

        Raises: ValueError: they do not fit the table.
        """
        del num_shards, step
        spec, whole, dtype = self.spec_of(table), (table.vocabulary_size, table.embedding_dim), params[0].dtype
        where, by_number = f"table {table.name!r}", lambda key: (len(key), key)
        cores = [rows[key] for key in sorted(rows, key=by_number)] if isinstance(rows, Mapping) else rows
        if isinstance(cores, (tuple, list)) and [np.shape(core) for core in cores] == list(spec.core_shapes):
            if not is_traced(cores):
                cores = [as_dtype(on_host(core), dtype, where, f"core {k}") for k, core in enumerate(cores)]
            return tuple(jnp.asarray(core, dtype) for core in cores), slots
        if not isinstance(rows, (Mapping, tuple)) and np.shape(rows) == whole:
            return nearest_cores(spec, as_dtype(cores, np.float32, where, "values"), dtype), slots
        raise ValueError(
            f"{where} is kept as a tensor train: give a whole table {list(whole)}, for the closest train, "
            f"or a tuple of cores {list(spec.core_shapes)}."
        )

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Numbers in the cores, and in their slots."""
        spec = self.spec_of(table)
        cores = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in spec.core_shapes]
        slots = jax.eval_shape(lambda c: init_core_slots(table.optimizer, c), cores)
        return spec.num_params, sum(leaf.size for leaf in jax.tree.leaves(slots))


def _rows(keys: Keys) -> Int[Array, " nnz"]:
    return jnp.where(keys.is_key, keys.low.astype(jnp.int32), NO_ROW)
