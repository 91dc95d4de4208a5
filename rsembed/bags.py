"""Converts the ids of a batch to one canonical form: `Bags` with ids, offsets and weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from rsembed.arrays import (
    AnyArray,
    check_unmasked,
    foreign_to_numpy,
    is_traced,
    numpy_or_jax,
)
from rsembed.checks import NonNegativeInt, check_type, describe
from rsembed.keys import Ids, Keys, join_keys, words_for_no_ids
from rsembed.lists import (
    are_integers,
    floats_of,
    ids_of_integers,
    ids_of_plain_rows,
    ids_of_row,
    join_ids,
    offsets_of,
)

PAD_ID = -1
"""Id that means "no id", in dense arrays and in padding after the last bag.

An id of -1 contributes nothing and is not an error.
"""


@no_type_check  # Types are not checked, because JAX puts placeholders into the fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bags:
    """Bags of ids: bag `b` holds `ids[offsets[b] : offsets[b + 1]]`.

    Args:
      ids: all ids, bag after bag, as an integer array or `Keys`. Entries after the last offset are
        padding, -1.
      offsets: start of each bag in `ids`, and the end of the last bag. The first offset is 0, and
        offsets never decrease.
      weights: one weight per id. Without `weights`, every id has weight 1.
      dense_shape: shape of the array that the ids came from, or None for ragged bags. Without a
        combiner, the shape of the activations is `dense_shape` plus a last axis for the embedding.

    Example:
      >>> from rsembed import Bags
      >>> Bags.from_lists([[3, 1], [], [4]]).offsets.tolist()
      [0, 2, 2, 3]
    """

    ids: Ids
    offsets: Int[Array | np.ndarray, " bags_plus_1"]
    weights: Float[Array | np.ndarray, " nnz"] | None = None
    dense_shape: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        return self.offsets.shape[0] - 1

    @staticmethod
    def from_lists(rows: Sequence[PyTree], weights: Sequence[PyTree] | None = None) -> Bags:
        """Bags from rows of ids, one row per bag.

        Args:
          rows: lists, tuples or one-dimensional arrays of any length, which may be empty.
          weights: a row of weights for each row of ids, with one weight per id. Without `weights`,
            every id has weight 1.

        Raises:
          TypeError: a row is not a flat sequence of integers.
          ValueError: the lengths of weights and ids differ.
        """
        check_type(rows, Sequence, "rows, one list of ids for each bag,")
        if weights is None:
            plain = ids_of_plain_rows(rows)
            if plain is not None:
                return Bags(*plain)
        id_rows = [ids_of_row(row, position) for position, row in enumerate(rows)]
        lengths = np.asarray([row.size for row in id_rows], np.int64)
        ids = join_ids(id_rows)
        if weights is None:
            return Bags.from_lengths(ids, lengths)
        check_type(weights, Sequence, "weights, one list for each bag,")
        if len(weights) != len(id_rows):
            raise ValueError(
                f"weights have {len(weights)} rows, ids {len(id_rows)}; they must match row by row."
            )
        weight_rows = []
        for position, row in enumerate(weights):
            weight_row = floats_of(row, f"row {position}").reshape(-1)
            if weight_row.size != lengths[position]:
                raise ValueError(
                    f"row {position} has {lengths[position]} ids but {weight_row.size} weights; "
                    "give one weight per id."
                )
            weight_rows.append(weight_row)
        return Bags.from_lengths(
            ids, lengths, np.concatenate([np.zeros(0, np.float32), *weight_rows])
        )

    @staticmethod
    def from_lengths(values: object, lengths: object, weights: object = None) -> Bags:
        """Bags from a jagged pair: all ids, and the number of ids in each bag.

        Args:
          values: ids `[ids]`, bag after bag.
          lengths: number of ids in each bag, `[bags]`.
          weights: one weight per id. Without `weights`, every id has weight 1.

        Raises:
          ValueError: a length is negative, the lengths do not add up to the number of ids, or the
            number of weights is not the number of ids.
          TypeError: lengths are not integers.
        """
        check_type(lengths, Int[np.ndarray, " bags"], "lengths")
        check_unmasked(values, "ids")
        values = np.asarray(values)
        lengths = np.asarray(lengths)
        if values.ndim != 1:
            raise ValueError(f"ids of all bags must have one axis, got shape {values.shape}.")
        if lengths.size and lengths.min() < 0:
            raise ValueError(
                f"lengths must not be negative, got {int(lengths.min())} at bag {int(lengths.argmin())}."
            )
        offsets = offsets_of(lengths)
        if offsets[-1] != values.size:
            raise ValueError(
                f"lengths add up to {int(offsets[-1])}, but there are {values.size} ids."
            )
        if weights is not None:
            weights = floats_of(weights, "from_lengths")
            if weights.shape != values.shape:
                raise ValueError(
                    f"there are {weights.size} weights for {values.size} ids; give one weight per id."
                )
        return Bags(values, offsets.astype(np.int32), weights)

    @staticmethod
    def from_dense(ids: Ids, weights: Any = None) -> Bags:
        """Bags from an array `[bags]` or `[bags, ids per bag]`.

        `from_dense` works outside and inside `jit`.

        Args:
          ids: array of integers or `Keys`. -1 means no id.
          weights: one weight per id, with the same shape as `ids`. Without `weights`, every id has
            weight 1.

        Raises:
          TypeError: ids are not an array.
          ValueError: ids do not have one or two axes, or weights have the wrong shape.
        """
        if not isinstance(ids, (Keys, jax.Array, np.ndarray)):
            raise TypeError(
                f"dense ids must be an array, got {describe(ids)}; Bags.from_lists takes lists."
            )
        check_unmasked((ids, weights), "ids or weights")
        xp = numpy_or_jax(ids)
        if ids.ndim not in (1, 2):
            raise ValueError(f"dense ids must have one or two axes, got shape {tuple(ids.shape)}.")
        num_bags = ids.shape[0]
        length = 1 if ids.ndim == 1 else ids.shape[1]
        offsets = xp.arange(num_bags + 1, dtype=np.int32) * np.int32(length)
        if weights is not None:
            if np.shape(weights) != tuple(ids.shape):
                raise ValueError(
                    f"weights have shape {np.shape(weights)}, ids {tuple(ids.shape)}; they must be equal."
                )
            if not jnp.issubdtype(getattr(weights, "dtype", int), np.floating):
                weights = floats_of(weights, "from_dense")
            weights = weights.astype(np.float32).reshape(-1)
        return Bags(ids.reshape(-1), offsets, weights, tuple(ids.shape))

    @staticmethod
    def from_coo(
        sample_ids: Any, embedding_ids: Any, gains: Any = None, *, num_samples: int
    ) -> Bags:
        """Bags from lists of coordinates (sample, id). The coordinates may be in any order.

        The ids of one sample have the same order as in `embedding_ids`.

        Args:
          sample_ids: sample of each id, `[nnz]`.
          embedding_ids: ids, `[nnz]`.
          gains: weight of each id, `[nnz]`. Without `gains`, every id has weight 1.
          num_samples: number of samples, which is the number of bags.

        Raises: ValueError: a sample id is outside `[0, num_samples)`, or the lists differ in
          length.
        """
        check_type(sample_ids, Int[np.ndarray, " nnz"], "sample ids")
        check_type(num_samples, NonNegativeInt, "num_samples")
        check_unmasked(embedding_ids, "embedding ids")
        samples = np.asarray(sample_ids)
        ids = np.asarray(embedding_ids)
        if gains is not None and np.shape(gains) != ids.shape:
            raise ValueError(
                f"there are {np.size(gains)} gains for {ids.size} ids; give one gain per id."
            )
        if samples.shape != ids.shape:
            raise ValueError(f"there are {samples.size} sample ids but {ids.size} embedding ids.")
        if samples.size and (samples.min() < 0 or samples.max() >= num_samples):
            least = int(samples.min())
            worst = least if least < 0 else int(samples.max())
            raise ValueError(
                f"sample id {worst} is outside [0, {num_samples}); raise num_samples or fix the list."
            )
        order = np.argsort(samples, kind="stable")
        weights = None
        if gains is not None:
            weights = floats_of(gains, "from_coo")[order]
        lengths = np.bincount(samples.astype(np.int64), minlength=num_samples)
        return Bags.from_lengths(ids[order], lengths, weights)

    @staticmethod
    def from_sparse_tensor(
        indices: object, values: object, dense_shape: Sequence[int], weights: object = None
    ) -> Bags:
        """Bags from the parts of a sparse tensor.

        Args:
          indices: sample of each id, and position of the id in the sample, `[nnz, 2]`. The second
            column, the positions, is ignored.
          values: ids, `[nnz]`. The ids of one sample have the same order as in `values`.
          dense_shape: shape `(samples, width)` of the tensor. The number of bags is `samples`.
          weights: one weight per id. Without `weights`, every id has weight 1.

        Raises: ValueError: an argument has the wrong shape, or a sample is outside `dense_shape`.
        """
        check_type(indices, Int[np.ndarray, "nnz two"], "indices [nnz, 2]")
        check_type(dense_shape, Int[np.ndarray, "two"], "dense_shape (samples, positions)")
        indices = np.asarray(indices)
        if indices.shape[1:] != (2,) or len(dense_shape) != 2:
            shapes = f"{indices.shape} and {len(dense_shape)} numbers"
            raise ValueError(
                f"indices must be [nnz, 2] and dense_shape (samples, positions), got {shapes}."
            )
        return Bags.from_coo(indices[:, 0], values, weights, num_samples=int(dense_shape[0]))

    def pad_to(self, num_ids: int) -> Bags:
        """The bags padded to `num_ids` ids, so that batches of different sizes share a program.

        Raises: ValueError: the bags have more than `num_ids` ids.
        """
        check_type(num_ids, int, "num_ids")
        missing = num_ids - self.ids.shape[0]
        if missing < 0:
            raise ValueError(
                f"the bags hold {self.ids.shape[0]} ids and cannot be padded to {num_ids}; raise num_ids."
            )
        if missing == 0 and self.dense_shape is None:
            return self
        xp = numpy_or_jax(self.ids)

        def with_zeros(array: AnyArray) -> AnyArray:
            return xp.concatenate([array, xp.zeros(missing, array.dtype)])

        if isinstance(self.ids, Keys):
            # Zeros in the mask `is_key` mean padding.
            ids: Ids = jax.tree.map(with_zeros, self.ids)
        else:
            padding = xp.full(missing, PAD_ID, self.ids.dtype)
            ids = xp.concatenate([self.ids, padding])
        weights = self.weights
        if weights is not None:
            weights = with_zeros(weights)
        return Bags(ids, self.offsets, weights)

    def to_lists(self) -> list[list[int]]:
        """The ids of every bag, without padding."""
        numbers = self.ids
        if isinstance(numbers, Keys):
            numbers = join_keys(numbers.high, numbers.low)
        numbers = np.asarray(numbers)
        is_id = _are_ids(self.ids)
        lists: list[list[int]] = []
        for start, end in itertools.pairwise(np.asarray(self.offsets)):
            bag = numbers[start:end]
            bag_ids = bag[is_id[start:end]]
            lists.append(bag_ids.tolist())
        return lists


class Jagged(Mapping[str, Bags]):
    """Mapping from feature names to `Bags`, with the ids of all features in one array.

    The arguments are the parts of TorchRec's KeyedJaggedTensor:
    `rs.Jagged(kjt.values(), kjt.lengths(), features=kjt.keys())`. A `Jagged` is a mapping from
    features to ids, so `collection.prepare` accepts a `Jagged`. The constructor copies no ids.

    Args:
      values: ids `[n]`, feature after feature, and sample after sample in each feature, as an array
        or a tensor in host memory.
      lengths: number of ids of each sample, `[features * samples]`, feature after feature.
      features: names of the features.
      weights: one weight per id, floats `[n]`. Without `weights`, every id has weight 1.

    The attribute `features` is the tuple of names. The attribute `bags` is one `Bags` with the bags
    of all features.

    Raises:
      TypeError: `values` or `lengths` are not arrays of integers, or weights are not floats.
      ValueError: a feature is named twice, a length is negative, the lengths do not add up to the
        number of ids, or the number of lengths is not a multiple of the number of features.

    Example:
      >>> import rsembed as rs
      >>> batch = rs.Jagged([3, 1, 4, 5], [2, 0, 1, 1], features=["a", "b"])
      >>> batch["b"].to_lists()
      [[4], [5]]
    """

    def __init__(
        self, values: object, lengths: object, *, features: Sequence[str], weights: object = None
    ):
        names = list(features)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Jagged: features must be names of features, each once, got {names}.")
        bags = Bags.from_lengths(
            foreign_to_numpy(values), foreign_to_numpy(lengths), foreign_to_numpy(weights)
        )
        if bags.num_bags % len(names):
            raise ValueError(
                f"Jagged: there are {bags.num_bags} lengths, which {len(names)} features cannot share equally; "
                "give one length for each sample of each feature."
            )
        self.features = tuple(names)
        self.bags = bags

    @property
    def _num_samples(self) -> int:
        return self.bags.num_bags // len(self.features)

    def __getitem__(self, feature: str) -> Bags:
        if feature not in self.features:
            raise KeyError(f"Jagged has no feature {feature!r}, only {list(self.features)}.")
        bags = self.bags
        num_samples = self._num_samples
        first = self.features.index(feature) * num_samples
        offsets = bags.offsets[first : first + num_samples + 1]
        of_feature = slice(int(offsets[0]), int(offsets[-1]))
        weights = None
        if bags.weights is not None:
            weights = bags.weights[of_feature]
        return Bags(bags.ids[of_feature], offsets - offsets[0], weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        num_ids = self.bags.ids.shape[0]
        return f"Jagged({', '.join(self.features)}: {self._num_samples} samples, {num_ids} ids)"


def as_bags(value: object, *, feature: str) -> Bags:
    """Bags from any accepted form of ids.

    Args:
      value: `Bags`, a dense array, nested lists, or a pair `(ids, weights)` of arrays or lists. An
        array may be anything that NumPy can read, such as a column of pandas, polars or Arrow, or a
        tensor in host memory. A column of lists has one bag per row.
      feature: name of the feature, for error messages.

    Raises: TypeError, ValueError: `value` has none of these forms, or its ids and weights do not
      match.
    """
    try:
        return _bags_of(value)
    except (TypeError, ValueError, RuntimeError) as error:
        # Torch raises RuntimeError for tensors that NumPy cannot read.
        raise type(error)(f"feature {feature!r}: {error}") from error


def _bags_of(value: Any) -> Bags:
    """Converts ids to `Bags`, without the name of the feature in error messages."""
    if isinstance(value, Bags):
        _check_arrays(value)
        return value
    ids = value
    weights = None
    if isinstance(value, tuple) and len(value) == 2:
        ids, weights = value
    ids = foreign_to_numpy(ids)
    weights = foreign_to_numpy(weights)
    if isinstance(ids, np.ndarray) and ids.dtype == object and not np.ma.isMaskedArray(ids):
        ids = ids.tolist()
    _check_weights_of_pair(weights)
    if isinstance(ids, (Keys, jax.Array, np.ndarray)):
        if isinstance(ids, np.ndarray) and not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(words_for_no_ids(ids))
        return Bags.from_dense(ids, weights)
    if isinstance(ids, list) and weights is None:
        plain = ids_of_plain_rows(ids)
        if plain is not None:
            return Bags(*plain)
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"ids must be Bags, an integer array or lists, got {type(ids).__name__}.")
    if is_traced(ids):
        raise TypeError(
            "inside jit ids are one array, not lists of them; call collection.prepare before jit."
        )
    if len(ids) and are_integers(ids):
        array = ids_of_integers(ids, "ids must fit 64 bits, got")
        return Bags.from_dense(array, weights)
    rows = []
    for row in ids:
        is_single_id = not isinstance(row, (list, tuple)) and np.ndim(row) == 0
        rows.append([row] if is_single_id else row)
    return Bags.from_lists(rows, weights)


def _check_weights_of_pair(weights: object) -> None:
    """Checks the weights of a pair `(ids, weights)`.

    Raises: TypeError: the weights are not an array or list of floats.
    """
    for leaf in jax.tree.leaves(weights):
        dtype = getattr(leaf, "dtype", float)
        if isinstance(leaf, int) or jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                "a pair means (ids, weights), and weights must be floats; pass two samples as a list instead of a "
                "tuple, or convert the weights."
            )
    if not isinstance(weights, (list, tuple, jax.Array, np.ndarray, type(None))):
        raise TypeError(f"weights must be in the form of the ids, got {describe(weights)}.")


def _check_arrays(bags: Bags) -> None:
    """Checks the types and shapes of the fields of `Bags` that a user constructed.

    Raises:
      TypeError: ids, offsets or weights are not an array, or have a wrong dtype.
      ValueError: ids have several axes, or `dense_shape` does not match the number of bags.
    """
    for name, array in (("ids", bags.ids), ("offsets", bags.offsets)):
        is_array = isinstance(array, (jax.Array, np.ndarray))
        if not is_array and not (name == "ids" and isinstance(array, Keys)):
            raise TypeError(
                f"{name} of Bags must be an array, got {describe(array)}; Bags.from_lists makes Bags from lists."
            )
    check_unmasked(bags.ids, "ids of Bags")
    if isinstance(bags.ids, np.ndarray) and not jnp.issubdtype(bags.ids.dtype, jnp.integer):
        raise TypeError(words_for_no_ids(bags.ids, bags.offsets))
    if bags.ids.ndim != 1 or not jnp.issubdtype(bags.offsets.dtype, np.integer):
        check_type(bags.offsets, Int[np.ndarray, "..."], "offsets of Bags")
        raise ValueError(
            f"ids of Bags must have one axis, got shape {bags.ids.shape}; Bags.from_dense takes two."
        )
    shape = bags.dense_shape
    if shape is not None and not is_traced(bags.offsets):
        num_ids = bags.ids.shape[0]
        ids_per_bag = math.prod(shape[1:])
        regular_offsets = np.arange(shape[0] + 1) * ids_per_bag
        is_regular = np.array_equal(np.asarray(bags.offsets), regular_offsets)
        if num_ids != regular_offsets[-1] or not is_regular:
            raise ValueError(
                f"dense_shape {shape} does not fit {num_ids} ids in {bags.num_bags} bags."
            )
    if bags.weights is not None and not isinstance(bags.weights, jax.Array):
        check_type(bags.weights, Float[np.ndarray, "..."], "weights of Bags")


def narrow_ids(ids: Ids) -> Ids:
    """Integer ids as an int32 array. If `ids` are `Keys`, they are returned unchanged.

    An id that does not fit int32 becomes a number outside every table, never another valid id.
    """
    if isinstance(ids, Keys):
        return ids
    xp = numpy_or_jax(ids)
    if ids.dtype.itemsize > 2 and ids.dtype != np.int32:
        lowest = 0 if xp.issubdtype(ids.dtype, xp.unsignedinteger) else PAD_ID - 1
        ids = xp.clip(ids, lowest, 2**31 - 1)
    return ids.astype(np.int32)


def check_ids_dtype(bags: Bags, *, feature: str) -> None:
    """Checks that a table without keys gets integer ids.

    Raises: TypeError: the ids are `Keys`, or are not integers.
    """
    if isinstance(bags.ids, Keys):
        raise TypeError(
            f"feature {feature!r}: its table has no storage that takes Keys; give it rsembed.Hashed."
        )
    if not jnp.issubdtype(bags.ids.dtype, jnp.integer):
        raise TypeError(f"feature {feature!r}: {words_for_no_ids(bags.ids, bags.offsets)}")


def check_values(
    bags: Bags,
    *,
    feature: str,
    table: str,
    vocabulary_size: int,
    allow_out_of_range: bool = False,
    way_to_drop: str | None = None,
) -> None:
    """Checks ids, offsets and weights of bags that are not traced.

    Args:
      bags: the bags to check.
      feature: name of the feature, for error messages.
      table: name of the feature's table, for error messages.
      vocabulary_size: number of rows of the table.
      allow_out_of_range: whether ids outside the table are allowed, False by default.
      way_to_drop: advice for the error message on how to drop ids outside the table. By default,
        the error message does not mention dropping ids.

    Raises: ValueError: an id is outside the table, offsets decrease, or a weight is not finite.
    """
    check_bags(bags, feature=feature)
    if allow_out_of_range:
        return
    offsets = np.asarray(bags.offsets)
    used = np.asarray(bags.ids)[: offsets[-1]]
    if not used.size or (int(used.min()) >= PAD_ID and int(used.max()) < vocabulary_size):
        return
    is_outside = (used < 0) | (used >= vocabulary_size)
    is_bad = is_outside & (used != PAD_ID)
    num_bad = int(is_bad.sum())
    position = int(is_bad.argmax())
    sample = _bag_of(position, offsets)
    ways_out = f"enlarge the table, hash the ids first, or use {PAD_ID} for missing ids"
    if way_to_drop is not None:
        ways_out = (
            f"enlarge the table, hash the ids first, use {PAD_ID} for missing ids, or {way_to_drop}"
        )
    raise ValueError(
        f"feature {feature!r}: id {int(used[position])} in sample {sample} is outside table {table!r} with "
        f"vocabulary_size={vocabulary_size} ({num_bad} such ids in the batch); {ways_out}."
    )


def check_bags(bags: Bags, *, feature: str) -> None:
    """Checks offsets and weights of bags that are not traced.

    Raises: ValueError: offsets decrease, an id is in no bag, an offset is beyond the ids, or a
      weight is missing or not finite.
    """
    offsets = np.asarray(bags.offsets)
    if bags.dense_shape is None:
        _check_offsets(bags.ids, offsets, feature)
    if bags.weights is None:
        return
    weights = np.asarray(bags.weights)
    num_ids = bags.ids.shape[0]
    if weights.shape != (num_ids,):
        raise ValueError(
            f"feature {feature!r}: {weights.size} weights for {num_ids} ids; give one per id."
        )
    is_finite = np.isfinite(weights[: offsets[-1]].astype(np.float32))
    if not is_finite.all():
        position = int(is_finite.argmin())
        sample = _bag_of(position, offsets)
        raise ValueError(
            f"feature {feature!r}: weight {float(weights[position])} in sample {sample} is not "
            "finite; clean the weights."
        )


def _check_offsets(ids: Ids, offsets: np.ndarray, feature: str) -> None:
    """Checks the concrete (not traced) offsets of bags.

    Raises: ValueError: offsets decrease, an id is in no bag, or an offset is beyond the ids.
    """
    is_list = offsets.ndim == 1 and offsets.size > 0
    if not is_list or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        first = offsets[:8].tolist()
        raise ValueError(
            f"feature {feature!r}: offsets must start at 0 and never fall, got {first}..."
        )
    num_ids = ids.shape[0]
    last = int(offsets[-1])
    if last > num_ids:
        raise ValueError(
            f"feature {feature!r}: the last offset is {last}, but there are {num_ids} ids."
        )
    # Entries of `ids` after the last offset are in no bag, so all of these entries must be padding.
    num_lost = int(_are_ids(ids)[last:].sum())
    if num_lost:
        raise ValueError(
            f"feature {feature!r}: the last offset is {last}, but there are {num_ids} ids, of which "
            f"{num_lost} would be in no bag; end the offsets with the number of ids, or fill up with -1."
        )


def _are_ids(ids: Ids) -> np.ndarray:
    """Mask of the ids as a NumPy array, False for padding."""
    if isinstance(ids, Keys):
        return np.asarray(ids.is_key)
    return np.asarray(ids) != PAD_ID


def _bag_of(position: int, offsets: np.ndarray) -> int:
    """Index of the bag that contains entry `position` of the ids."""
    return int(np.searchsorted(offsets, position, side="right")) - 1
