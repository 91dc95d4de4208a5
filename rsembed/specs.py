"""Specs of tables and features, and the settings that a stacking plan attaches to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Annotated, Any, Literal, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp

from rsembed.checks import PositiveInt, check_fields, check_type, dtype_among
from rsembed.optimizers import SGD, OptimizerSpec

DEFAULT_ACTIVATION_MEM_BYTES_LIMIT = 2 * 1024 * 1024
Combiner = Literal["sum", "mean", "sqrtn", "none"]
TABLE_DTYPES = ("float32", "bfloat16", "float16")
MAX_ROWS = 2**31 - 1
"""Maximum number of rows in a table or a stack.

Row numbers are int32, and the largest int32 means padding."""

CallableTableInitializer = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Rounding of looked-up rows before they are combined ("fake quantization").

    The numbers of a row are rounded to `num_buckets` evenly spaced values from `min_value` to
    `max_value`. Only the result of a lookup is rounded, and the numbers in the table are not.
    """

    min_value: float
    max_value: float
    num_buckets: Annotated[int, "[2, inf)"]

    def __post_init__(self) -> None:
        check_fields(self)
        if not -math.inf < self.min_value < self.max_value < math.inf:
            raise ValueError(
                f"QuantizationConfig: min_value {self.min_value} must be below max_value {self.max_value}, both finite."
            )

    def as_tuple(self) -> tuple[float, float, int]:
        """The settings as a tuple `(min_value, max_value, num_buckets)`."""
        return self.min_value, self.max_value, self.num_buckets

    def quantize(self, values: jax.Array) -> jax.Array:
        """`values` rounded to the nearest bucket. Values halfway between buckets are rounded up."""
        width = (self.max_value - self.min_value) / (self.num_buckets - 1)
        clipped = jnp.clip(values, self.min_value, self.max_value)
        position = (clipped - self.min_value) / width
        bucket = jnp.floor(position + 0.5)
        return bucket * width + self.min_value


@dataclasses.dataclass(frozen=True)
class FeatureIdTransformation:
    """Offsets of the samples and ids of a feature inside its stack.

    Args:
      row_offset: offset of the feature's first sample in the stacked batch.
      col_offset: offset of the feature's table in the stacked table, in rows. The field is called
        `col_offset` because jax-tpu-embedding uses this name.
      col_shift: rotation of the feature's table, in shards.
    """

    row_offset: int = 0
    col_offset: int = 0
    col_shift: int = 0


@dataclasses.dataclass(frozen=True)
class TableSettingInStack:
    """Padded size and offsets of a table inside its stack, in rows, columns and shards."""

    stack_name: str
    padded_vocab_size: int
    padded_embedding_dim: int
    row_offset_in_shard: int = 0
    shard_rotation: int = 0


@dataclasses.dataclass(frozen=True)
class StackedTableSpec:
    """One physical table, the concatenated tables of a stack.

    Row `i` of the physical table is in shard `i % num_shards`.
    """

    stack_name: str
    stack_vocab_size: int
    stack_embedding_dim: int
    optimizer: OptimizerSpec
    combiner: Combiner
    total_sample_count: int
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    suggested_coo_buffer_size_per_device: int | None = None
    quantization_config: QuantizationConfig | None = None
    activation_mem_bytes_limit: int = dataclasses.field(
        default=DEFAULT_ACTIVATION_MEM_BYTES_LIMIT, repr=False
    )
    # `num_shards` is 0 if a user and not a stacking function constructed the stack.
    num_shards: int = dataclasses.field(default=0, repr=False)

    def replace(self, **changes: Any) -> StackedTableSpec:
        """Copy of the spec in which the fields named in `changes` have new values."""
        return dataclasses.replace(self, **changes)


@runtime_checkable
class Storage(Protocol):
    """Minimal interface of `TableSpec(storage=...)`: how the rows of a table are stored.

    A storage must be immutable and hashable. The engine of `EmbeddingCollection` uses a larger
    interface, `rsembed.storage.Storage`.
    """

    @property
    def key_dtype(self) -> str | None:
        """Dtype of the keys, or None if ids are row numbers below `vocabulary_size`.

        In a table with keys, `vocabulary_size` is the capacity of the table.
        """

    def sharing_key(self, table: TableSpec) -> Hashable:
        """Key that is equal for tables that can share a storage.

        None if `table` cannot share a storage with other tables.
        """

    def check(self, table: TableSpec) -> None:
        """Checks that the storage supports the table.

        Raises: ValueError or NotImplementedError: the storage does not support the table.
        """

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Number of values in the stored table, and number of values in its optimizer state."""


@no_type_check  # `TableSpec.__post_init__` checks the fields, and names the field in errors.
@dataclasses.dataclass(unsafe_hash=True)
class TableSpec:
    """Declaration of an embedding table.

    After a stacking function has put the table into a stack, the public fields of the table cannot
    be set.

    Args:
      name: name of the table, unique in a model.
      vocabulary_size: number of rows. Ids run from 0 to `vocabulary_size - 1`.
      embedding_dim: number of columns.
      initializer: function `(key, shape)`, called with the logical shape
        `(vocabulary_size, embedding_dim)`. The default initializer draws normal values with
        standard deviation `1 / sqrt(embedding_dim)`.
      optimizer: optimizer of the looked-up rows, by default SGD with learning rate 0.001.
      combiner: `sum` (default), `mean`, `sqrtn`, or `none` (one vector per id: sequence output).
      max_ids_per_partition: maximum number of entries that one core sends to one shard, 256 by
        default. Only SparseCore layouts use `max_ids_per_partition`. Raise `max_ids_per_partition`
        if preprocessing drops ids, or let feedback-directed optimisation (`rsembed.fdo`) choose the
        limit.
      max_unique_ids_per_partition: maximum number of distinct ids that one core sends to one shard,
        256 by default.
      suggested_coo_buffer_size_per_device: size of a device's input buffer, in entries. If None,
        the default, the buffer has room for `max_ids_per_partition` entries in every partition.
      quantization_config: rounding of rows at lookup. If None, the default, rows are not rounded.
      dtype: dtype of the table: `float32` (default), `bfloat16` or `float16`. Sums and optimizers
        always compute in float32.
      stochastic_rounding: whether updated rows of a 16-bit table are rounded up or down at random,
        without bias. False by default.
      storage: storage of the rows, such as `rsembed.Hashed` or `rsembed.tt.TensorTrain`. If None,
        the default, the table is an array.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: CallableTableInitializer = dataclasses.field(
        default_factory=lambda: default_initializer
    )
    optimizer: OptimizerSpec = dataclasses.field(default_factory=SGD)
    combiner: Combiner = "sum"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    suggested_coo_buffer_size_per_device: int | None = None
    quantization_config: QuantizationConfig | None = None
    # The class `TableSpec` of jax-tpu-embedding does not have the fields `dtype`,
    # `stochastic_rounding` and `storage`, so `repr` leaves out these fields. A printed stacking
    # plan shows the dtype of each stack.
    dtype: str = dataclasses.field(default="float32", repr=False, kw_only=True)
    stochastic_rounding: bool = dataclasses.field(default=False, repr=False, kw_only=True)
    storage: Storage | None = dataclasses.field(default=None, repr=False, kw_only=True)
    _stacked_table_spec: StackedTableSpec | None = None
    _setting_in_stack: TableSettingInStack = None  # type: ignore[assignment]  # __post_init__ sets it

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"TableSpec: name must be a non-empty string, got {self.name!r}.")
        where = f"table {self.name!r}"
        stack = self._stacked_table_spec
        self._stacked_table_spec = None
        for field in (
            "vocabulary_size",
            "embedding_dim",
            "max_ids_per_partition",
            "max_unique_ids_per_partition",
        ):
            setattr(self, field, _positive_int(getattr(self, field), where, field))
        if isinstance(self.storage, type):
            raise TypeError(
                f"{where}: storage must be made first, as in {self.storage.__name__}(...)."
            )
        check_type(self.storage, Storage | None, f"{where}: storage, such as rsembed.Hashed(...),")
        takes_keys = self.storage is not None and self.storage.key_dtype is not None
        if self.vocabulary_size > MAX_ROWS and not takes_keys:
            raise ValueError(
                f"{where}: vocabulary_size={self.vocabulary_size} exceeds {MAX_ROWS}, the most "
                "rows that 32-bit ids reach; split the table, or hash the ids into fewer rows."
            )
        if self.suggested_coo_buffer_size_per_device is not None:
            self.suggested_coo_buffer_size_per_device = _positive_int(
                self.suggested_coo_buffer_size_per_device,
                where,
                "suggested_coo_buffer_size_per_device",
            )
        if not callable(self.initializer):
            raise TypeError(
                f"{where}: initializer must be a function of (key, shape), got {self.initializer!r}."
            )
        if isinstance(self.optimizer, type):
            raise TypeError(
                f"{where}: optimizer must be made first, as in {self.optimizer.__name__}(...)."
            )
        makers = (
            "rsembed.optimizers.Adam(0.01) and its like make one, rsembed.from_optax one of optax's"
        )
        check_type(self.optimizer, OptimizerSpec, f"{where}: optimizer ({makers})")
        check_type(self.combiner, Combiner, f"{where}: combiner")
        self.dtype = dtype_among(TABLE_DTYPES, self.dtype, f"{where}: dtype")
        check_type(
            self.quantization_config, QuantizationConfig | None, f"{where}: quantization_config"
        )
        check_type(self.stochastic_rounding, bool, f"{where}: stochastic_rounding")
        # `dataclasses.replace` passes the stack of the original table to the new table.
        # `__post_init__` drops the passed stack, because the new table is not in a stack.
        # `__post_init__` keeps a stack with 0 shards, because a user constructed and passed the
        # stack.
        if stack is not None and not stack.num_shards:
            self._stacked_table_spec = stack
        if self._stacked_table_spec is None or self._setting_in_stack is None:
            self._setting_in_stack = TableSettingInStack(
                self.name, self.vocabulary_size, self.embedding_dim
            )
        if self.storage is not None:
            self.storage.check(self)

    def __setattr__(self, name: str, value: object) -> None:
        is_public_field = name in type(self).__dataclass_fields__ and not name.startswith("_")
        if is_public_field and getattr(self, "_stacked_table_spec", None) is not None:
            raise AttributeError(
                f"table {self.name!r} is already placed in stack "
                f"{self._setting_in_stack.stack_name!r}, so {name!r} can no longer be set; build "
                "new specs, or set it before stacking."
            )
        object.__setattr__(self, name, value)

    @property
    def setting_in_stack(self) -> TableSettingInStack:
        """Padded size and offsets of the table in its stack.

        Before stacking, the offsets are 0, and the size has no padding.
        """
        return self._setting_in_stack

    @setting_in_stack.setter
    def setting_in_stack(self, setting: TableSettingInStack) -> None:
        self._setting_in_stack = setting

    @property
    def stacked_table_spec(self) -> StackedTableSpec | None:
        """The stack of the table, or None before stacking."""
        return self._stacked_table_spec

    @stacked_table_spec.setter
    def stacked_table_spec(self, spec: StackedTableSpec | None) -> None:
        self._stacked_table_spec = spec

    def is_stacked(self) -> bool:
        """Whether the table is placed in a stack, alone or with other tables."""
        return self._stacked_table_spec is not None


@no_type_check  # `FeatureSpec.__post_init__` checks the fields, and names the field in errors.
@dataclasses.dataclass(unsafe_hash=True)
class FeatureSpec:
    """Declaration of a categorical input that reads a table.

    Args:
      name: name of the feature, unique in a model.
      table_spec: the table. Several features can share one table.
      input_shape: `(samples, ids per sample)` of the GLOBAL batch. The number of ids may be None,
        for samples of any length. If `input_shape` is None, the default, batches may have any
        shape.
      output_shape: shape `(..., dim)` of the global activations, with `prod(output_shape[:-1])`
        samples. With a `dim` below the table's `embedding_dim`, activations have only the first
        `dim` columns. In padded layouts, `dim` may be `embedding_dim` rounded up to a multiple of
        8, and the columns after `embedding_dim` are zero. If None, the default, the shape is
        inferred from the input.
      combiner: `sum`, `mean`, `sqrtn` or `none`, for this feature only. If None, the default, the
        feature has the combiner of the table. For example, one feature can pool a table that
        another feature reads as a sequence. In a SparseCore layout, a feature must have the
        combiner of its table.
    """

    name: str
    table_spec: TableSpec
    input_shape: tuple[Any, ...] | None = None
    output_shape: tuple[int, ...] | None = None
    # The class `FeatureSpec` of jax-tpu-embedding does not have the field `combiner`, so `repr`
    # leaves out this field.
    combiner: Combiner | None = dataclasses.field(default=None, repr=False, kw_only=True)
    _id_transformation: FeatureIdTransformation = dataclasses.field(
        default_factory=FeatureIdTransformation
    )

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"FeatureSpec: name must be a non-empty string, got {self.name!r}.")
        where = f"feature {self.name!r}"
        check_type(self.table_spec, TableSpec, f"{where}: table_spec")
        check_type(self.combiner, Combiner | None, f"{where}: combiner")
        for field in ("input_shape", "output_shape"):
            shape = getattr(self, field)
            check_type(shape, tuple | None, f"{where}: {field}")
            if shape is not None:
                sizes = []
                for axis, size in enumerate(shape):
                    may_be_none = field == "input_shape" and axis > 0
                    if not (may_be_none and size is None):
                        size = _positive_int(size, where, field)
                    sizes.append(size)
                if not sizes:
                    raise ValueError(f"{where}: {field} must have sizes, such as (8, 4), got ().")
                setattr(self, field, tuple(sizes))
        stack = self.table_spec.stacked_table_spec
        if stack is None or stack.num_shards:
            # `dataclasses.replace` passes the offsets of the original feature to the new feature.
            # `__post_init__` drops the passed offsets, because the new feature is not in a stack
            # yet.
            self._id_transformation = FeatureIdTransformation()
        if self.output_shape is not None:
            dim = self.table_spec.embedding_dim
            output_dim = self.output_shape[-1]
            padded_dim = -(-dim // 8) * 8
            if dim < output_dim != padded_dim:
                raise ValueError(
                    f"{where}: output_shape {self.output_shape} asks for {output_dim} columns, "
                    f"but table {self.table_spec.name!r} has embedding_dim={dim}. Give at most {dim} "
                    f"columns, or {padded_dim} with padding."
                )

    @property
    def id_transformation(self) -> FeatureIdTransformation:
        """Offsets of the feature inside its stack."""
        return self._id_transformation

    @id_transformation.setter
    def id_transformation(self, value: FeatureIdTransformation) -> None:
        self._id_transformation = value

    @property
    def pooling(self) -> Combiner:
        """The combiner of the feature, or of its table if the field `combiner` is None."""
        return self.table_spec.combiner if self.combiner is None else self.combiner

    def check_pooled_as_table(self) -> None:
        """Checks that feature and table have equal combiners, which a padded stack requires.

        Raises: ValueError: the combiners differ.
        """
        if self.pooling != self.table_spec.combiner:
            raise ValueError(
                f"feature {self.name!r}: combiner={self.combiner!r} differs from "
                f"{self.table_spec.combiner!r} of table {self.table_spec.name!r}, but a "
                "SparseCore stack has one combiner; leave it out of the feature, or train the "
                "table with EmbeddingCollection."
            )

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the global batch, or None if no shape is declared."""
        if self.output_shape is not None:
            return math.prod(self.output_shape[:-1])
        return None if self.input_shape is None else self.input_shape[0]

    @property
    def output_dim(self) -> int:
        """Number of columns of the activations."""
        return self.table_spec.embedding_dim if self.output_shape is None else self.output_shape[-1]


def _positive_int(value: Any, where: str, field: str) -> int:
    check_type(value, PositiveInt, f"{where}: {field}")
    return int(value)


def default_initializer(
    key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
    """Normal values with standard deviation `1 / sqrt(dim)`: rows of norm about one."""
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-1])


def features_of(features: object) -> list[FeatureSpec]:
    """The feature specs of a nested structure, in the order of `jax.tree.leaves`.

    Raises:
      TypeError: a leaf is not a FeatureSpec, or keys of a dict cannot be sorted.
      ValueError: `features` is empty, two features share a name, or two different tables share a
        name.
    """
    try:
        leaves = jax.tree.leaves(features)
    except ValueError as error:
        raise TypeError(
            "features: keys of one dictionary must have an order; let all of them be texts."
        ) from error
    for leaf in leaves:
        if not isinstance(leaf, FeatureSpec):
            raise TypeError(
                f"features must be FeatureSpecs (nested in lists or dicts), got {type(leaf).__name__}."
            )
    if not leaves:
        raise ValueError("features: there is no FeatureSpec in it.")
    names = [feature.name for feature in leaves]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"feature names must be unique, but {repeated} appear more than once.")
    tables: dict[str, TableSpec] = {}
    for feature in leaves:
        table = tables.setdefault(feature.table_spec.name, feature.table_spec)
        if table is not feature.table_spec and table != feature.table_spec:
            raise ValueError(
                f"two different tables are named {table.name!r} (one is read by feature "
                f"{feature.name!r}); they differ in "
                f"{_differing_fields(table, feature.table_spec)}. Give them different names, or "
                "give one TableSpec to all features that share the table."
            )
    return leaves


def _differing_fields(table: TableSpec, other: TableSpec) -> str:
    """Names of the fields that differ between two tables, as a string for an error message."""
    names = [field.name for field in dataclasses.fields(table) if not field.name.startswith("_")]
    differing = [name for name in names if getattr(table, name) != getattr(other, name)]
    return ", ".join(differing) or "their place in a stack"


def tables_of(features: object) -> dict[str, TableSpec]:
    """The tables that `features` read, by name, in the order of the features."""
    tables: dict[str, TableSpec] = {}
    for feature in features_of(features):
        tables.setdefault(feature.table_spec.name, feature.table_spec)
    return tables
