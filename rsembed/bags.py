"""Ids of a batch in one canonical form, `Bags`: ids, offsets and weights."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import marshal
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from rsembed.checks import NonNegativeInt, check_type, describe
from rsembed.keys import FILL, HASH, Keys, is_missing, join_keys, words_for_no_ids

PAD_ID = -1
"""Means "no id" in dense arrays and in padding after the last bag.

It contributes nothing and is no error.
"""
FEWEST_OF_ONE_LENGTH = 16
"""Fewest bags of equal length for which the length is taken to be fixed, and not a coincidence."""


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bags:
    """Bags of ids: bag `b` holds `ids[offsets[b] : offsets[b + 1]]`.

    Args:
      ids: all ids, bag after bag, as an integer array or `Keys`. Entries after the last offset are
        padding, -1.
      offsets: starts at 0 and never falls.
      weights: one per id. None means ones.
      dense_shape: shape of the array that the ids came from, or None. Activations without a
        combiner take it over.

    Example:
      >>> from rsembed import Bags
      >>> Bags.from_lists([[3, 1], [], [4]]).offsets.tolist()
      [0, 2, 2, 3]
    """

    ids: PyTree
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
          weights: rows of weights with the lengths of the rows of ids. None means ones.

        Raises:
          TypeError: a row is not a flat sequence of integers.
          ValueError: the lengths of weights and ids differ.
        """
        check_type(rows, Sequence, "rows, one list of ids for each bag,")
        if weights is None and (plain := bags_of_plain_rows(rows)) is not None:
            return plain
        arrays = [_flat_ids(row, position) for position, row in enumerate(rows)]
        lengths = np.asarray([a.size for a in arrays], np.int64)
        ids = _joined(arrays)
        if weights is None:
            return Bags.from_lengths(ids, lengths)
        check_type(weights, Sequence, "weights, one list for each bag,")
        if len(weights) != len(arrays):
            raise ValueError(
                f"weights have {len(weights)} rows, ids {len(arrays)}; they must match row by row."
            )
        flat = [_floats(w, f"row {position}").reshape(-1) for position, w in enumerate(weights)]
        for position, (w, a) in enumerate(zip(flat, arrays, strict=True)):
            if w.size != a.size:
                raise ValueError(
                    f"row {position} has {a.size} ids but {w.size} weights; give one weight per id."
                )
        return Bags.from_lengths(
            ids, lengths, np.concatenate(flat) if flat else np.zeros(0, np.float32)
        )

    @staticmethod
    def from_lengths(values: PyTree, lengths: Any, weights: PyTree = None) -> Bags:
        """Bags from a jagged pair: all ids, and the number of ids in each bag.

        Args:
          values: ids `[ids]`, bag after bag.
          lengths: number of ids in each bag, `[bags]`.
          weights: one per id. None means ones.

        Raises:
          ValueError: a length is negative, the lengths do not add up to the number of ids, or there
            is not one weight per id.
          TypeError: lengths are not integers.
        """
        check_type(lengths, Int[np.ndarray, " bags"], "lengths")
        check_unmasked(values, "ids")
        values, lengths = np.asarray(values), np.asarray(lengths)
        if values.ndim != 1:
            raise ValueError(f"ids of all bags must have one axis, got shape {values.shape}.")
        if lengths.size and lengths.min() < 0:
            raise ValueError(
                f"lengths must not be negative, got {int(lengths.min())} at bag {int(lengths.argmin())}."
            )
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        if offsets[-1] != values.size:
            raise ValueError(
                f"lengths add up to {int(offsets[-1])}, but there are {values.size} ids."
            )
        weights = None if weights is None else _floats(weights, "from_lengths")
        if weights is not None and weights.shape != values.shape:
            raise ValueError(
                f"there are {weights.size} weights for {values.size} ids; give one weight per id."
            )
        return Bags(values, offsets.astype(np.int32), weights)

    @staticmethod
    def from_dense(ids: PyTree, weights: PyTree = None) -> Bags:
        """Bags from an array `[bags]` or `[bags, ids per bag]`. Works inside `jit`.

        Args:
          ids: array of integers or `Keys`. -1 means no id.
          weights: array with the shape of `ids`. None means ones.

        Raises:
          TypeError: ids are not an array.
          ValueError: ids do not have one or two axes, or weights have another shape.
        """
        if not isinstance(ids, (Keys, jax.Array, np.ndarray)):
            raise TypeError(
                f"dense ids must be an array, got {describe(ids)}; Bags.from_lists takes lists."
            )
        check_unmasked((ids, weights), "ids or weights")
        xp = _module_of(ids)
        if ids.ndim not in (1, 2):
            raise ValueError(f"dense ids must have one or two axes, got shape {tuple(ids.shape)}.")
        num_bags, length = ids.shape[0], 1 if ids.ndim == 1 else ids.shape[1]
        if weights is not None and np.shape(weights) != tuple(ids.shape):
            raise ValueError(
                f"weights have shape {np.shape(weights)}, ids {tuple(ids.shape)}; they must be equal."
            )
        offsets = xp.arange(num_bags + 1, dtype=np.int32) * np.int32(length)
        if weights is not None and not jnp.issubdtype(weights.dtype, np.floating):
            weights = _floats(weights, "from_dense")
        flat_weights = None if weights is None else weights.astype(np.float32).reshape(-1)
        return Bags(ids.reshape(-1), offsets, flat_weights, tuple(ids.shape))

    @staticmethod
    def from_coo(
        sample_ids: Any, embedding_ids: Any, gains: Any = None, *, num_samples: int
    ) -> Bags:
        """Bags from coordinate lists in any order. Ids of one sample keep their order.

        Args:
          sample_ids: sample of each id, `[nnz]`.
          embedding_ids: ids, `[nnz]`.
          gains: weight of each id, `[nnz]`. None means ones.
          num_samples: number of samples, which is the number of bags.

        Raises: ValueError: a sample id is outside `[0, num_samples)`, or the lists differ in
          length.
        """
        check_type(sample_ids, Int[np.ndarray, " nnz"], "sample ids")
        check_type(num_samples, NonNegativeInt, "num_samples")
        check_unmasked(embedding_ids, "embedding ids")
        samples, ids = np.asarray(sample_ids), np.asarray(embedding_ids)
        if gains is not None and np.shape(gains) != ids.shape:
            raise ValueError(
                f"there are {np.size(gains)} gains for {ids.size} ids; give one gain per id."
            )
        if samples.shape != ids.shape:
            raise ValueError(f"there are {samples.size} sample ids but {ids.size} embedding ids.")
        if samples.size and (samples.min() < 0 or samples.max() >= num_samples):
            worst = int(samples.min() if samples.min() < 0 else samples.max())
            raise ValueError(
                f"sample id {worst} is outside [0, {num_samples}); raise num_samples or fix the list."
            )
        order = np.argsort(samples, kind="stable")
        weights = None if gains is None else _floats(gains, "from_coo")[order]
        return Bags.from_lengths(
            ids[order], np.bincount(samples.astype(np.int64), minlength=num_samples), weights
        )

    @staticmethod
    def from_sparse_tensor(
        indices: PyTree, values: PyTree, dense_shape: Sequence[int], weights: PyTree = None
    ) -> Bags:
        """Bags from the parts of a sparse tensor.

        Args:
          indices: sample and position of each id, `[nnz, 2]`.
          values: ids, `[nnz]`.
          dense_shape: number of samples and width.
          weights: one per id. None means ones.

        Raises: ValueError: an argument has another shape, or a sample is outside `dense_shape`.
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

        Raises: ValueError: the bags have more ids.
        """
        check_type(num_ids, int, "num_ids")
        missing = num_ids - self.ids.shape[0]
        if missing < 0:
            raise ValueError(
                f"the bags hold {self.ids.shape[0]} ids and cannot be padded to {num_ids}; raise num_ids."
            )
        if missing == 0 and self.dense_shape is None:
            return self
        xp = _module_of(self.ids)
        if isinstance(self.ids, Keys):
            ids: PyTree = jax.tree.map(
                lambda lane: xp.concatenate([lane, xp.zeros(missing, lane.dtype)]), self.ids
            )
        else:
            ids = xp.concatenate([self.ids, xp.full(missing, PAD_ID, self.ids.dtype)])
        weights = None
        if self.weights is not None:
            weights = xp.concatenate([self.weights, xp.zeros(missing, self.weights.dtype)])
        return Bags(ids, self.offsets, weights)

    def to_lists(self) -> list[list[int]]:
        """The ids of every bag, without padding."""
        ids, offsets = self.ids, np.asarray(self.offsets)
        is_id = np.asarray(ids.is_key if isinstance(ids, Keys) else ids != PAD_ID)
        numbers = join_keys(ids.high, ids.low) if isinstance(ids, Keys) else np.asarray(ids)
        return [[int(i) for i in numbers[a:b][is_id[a:b]]] for a, b in itertools.pairwise(offsets)]


class Jagged(Mapping[str, Bags]):
    """Bags of several features in one pair of arrays: a mapping from features to `Bags`.

    This is the form of TorchRec's KeyedJaggedTensor:
    `rs.Jagged(kjt.values(), kjt.lengths(), features=kjt.keys())`. `collection.prepare` accepts it,
    like every mapping. The constructor copies no ids.

    Args:
      values: ids `[n]`, feature after feature, and sample after sample in each feature. An array or
        a tensor in host memory.
      lengths: number of ids of each sample, `[features * samples]`, in the same order.
      features: names of the features.
      weights: one per id, floats `[n]`. None means ones.

    The attribute `features` is the tuple of names, and `bags` has the bags of all features as one
    `Bags`.

    Raises:
      TypeError: `values` or `lengths` are not arrays of integers, or weights are not floats.
      ValueError: a feature is named twice, or lengths are negative, do not add up or cannot be
        divided equally among the features.

    Example:
      >>> import rsembed as rs
      >>> batch = rs.Jagged([3, 1, 4, 5], [2, 0, 1, 1], features=["a", "b"])
      >>> batch["b"].to_lists()
      [[4], [5]]
    """

    def __init__(self, values: Any, lengths: Any, *, features: Sequence[str], weights: Any = None):
        names = list(features)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Jagged: features must be names of features, each once, got {names}.")
        everything = Bags.from_lengths(
            foreign_to_numpy(values), foreign_to_numpy(lengths), foreign_to_numpy(weights)
        )
        if everything.num_bags % len(names):
            raise ValueError(
                f"Jagged: there are {everything.num_bags} lengths, which {len(names)} features cannot share equally; "
                "give one length for each sample of each feature."
            )
        self.features = tuple(names)
        self.bags = everything

    def __getitem__(self, feature: str) -> Bags:
        if feature not in self.features:
            raise KeyError(f"Jagged has no feature {feature!r}, only {list(self.features)}.")
        bags, num_samples = self.bags, self.bags.num_bags // len(self.features)
        first = self.features.index(feature) * num_samples
        offsets = bags.offsets[first : first + num_samples + 1]
        ids = slice(int(offsets[0]), int(offsets[-1]))
        weights = None if bags.weights is None else bags.weights[ids]
        return Bags(bags.ids[ids], offsets - offsets[0], weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        num_samples = self.bags.num_bags // len(self.features)
        return f"Jagged({', '.join(self.features)}: {num_samples} samples, {self.bags.ids.shape[0]} ids)"


def _module_of(ids: PyTree) -> PyTree:
    """Numpy or jax.numpy, whichever computes with `ids`."""
    return np if isinstance(jax.tree.leaves(ids)[0], np.ndarray) else jnp


def bags_of_plain_rows(rows: Sequence[PyTree]) -> Bags | None:
    """Bags of rows that are all lists of `int` or all arrays; None for other rows.

    It reads all rows in one call, which is 20 times as fast as row by row.
    """
    small = small_ids_of_lists(rows)
    if small is not None:
        ids, offsets = small
        return Bags(ids.astype(np.int64), offsets)
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        filled = [row for row in rows if row.size]  # Empty arrays are float64 if made from [].
        if {row.ndim for row in rows} != {1} or {row.dtype.kind for row in filled} != {"i"}:
            return None
        ids = np.concatenate(filled)
    else:
        flat = list(itertools.chain.from_iterable(rows)) if kinds == {list} else [None]
        if not set(map(type, flat)) <= {int}:
            return None
        try:
            ids = np.asarray(flat, np.int64)
        except OverflowError:  # Some ids do not fit int64.
            return None
    return Bags.from_lengths(ids, np.fromiter(map(len, rows), np.int64, len(rows)))


_MARSHALLED = np.dtype([("kind", "u1"), ("value", "<i4")])


def small_ids_of_lists(rows: Sequence[PyTree]) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and offsets, int32, of a list of lists of `int` that fit 32 bits; else None.

    `marshal` reads every object once, in C. Numpy takes three passes to find types, values and
    lengths. In version 2 of the marshal format, a list is the letter "[" and its length, and an
    integer of 32 bits is "i" and its value: five bytes each. No other type has one of these letters
    (bool has "T" and "F"). So the result is correct if only these two letters occur, and if a list
    begins exactly where a row must begin. If a later Python changes the format, this returns None,
    and the caller reads the lists in another way.
    """
    first_row = next(iter(rows), None)
    if type(rows) is not list or type(first_row) is not list:
        return None
    if first_row and (type(first_row[0]) is not int or first_row[0] >= 2**31):
        return None  # Probably 64-bit keys, which the slow path reads anyway.
    try:
        written = marshal.dumps(rows, 2)
    except ValueError:  # An object that marshal cannot write.
        return None
    if len(written) % _MARSHALLED.itemsize:
        return None
    items = np.frombuffer(written, _MARSHALLED)
    is_id = items["kind"] == ord("i")
    heads = np.flatnonzero(~is_id)
    if heads.size != len(rows) + 1 or (items["kind"][heads] != ord("[")).any():
        return None
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(items["value"][heads[1:]], out=offsets[1:])
    # The list of all rows comes first. Each row begins after the ids of the rows before it.
    expected_heads = offsets[:-1] + np.arange(1, len(rows) + 1)
    if not np.array_equal(heads[1:], expected_heads):
        return None
    return items["value"][is_id], offsets


def _flat_ids(row: Any, position: int) -> np.ndarray:
    if isinstance(row, str) or not hasattr(row, "__len__"):
        raise TypeError(
            f"row {position} must be a flat list of ids, got {row!r}; give one list of ids for each bag."
        )
    check_unmasked(row, f"the ids of row {position}")
    if isinstance(row, np.ndarray) and row.dtype == object:
        row = row.tolist()  # Numpy makes an integer array of the list if all values are integers.
    try:
        # Numpy reads an empty list as float64.
        array = np.asarray(row) if len(row) else np.zeros(0, np.int64)
    except ValueError:  # Nested lists of different lengths.
        array = np.zeros((0, 0))
    # Numpy makes floats of integers if some fit int64 and others only uint64.
    if array.dtype.kind == "f" and all(isinstance(own, int) for own in row):
        array = _joined([np.asarray([own]) for own in row])
    if array.dtype == object and array.ndim == 1 and _are_integers(array):
        array = _joined_integers(
            array, f"row {position} holds ids that do not fit 64 bits, such as"
        )
    if array.ndim == 1 and np.issubdtype(array.dtype, np.integer):
        return array
    for value in row:
        if is_missing(value):
            raise TypeError(f"row {position} has a missing value ({value}); {FILL}")
        if isinstance(value, (str, bytes)):
            raise TypeError(
                f"row {position} holds texts ({value!r}), but ids must be integers; {HASH}"
            )
    if array.ndim != 1 or array.dtype == object:
        raise TypeError(
            f"row {position} must be a flat list of ids, got {row!r}; the input is nested too deeply."
        )
    raise TypeError(
        f"row {position} holds {array.dtype} values, but ids must be integers; convert them."
    )


def _are_integers(values: Any) -> bool:
    """Whether every entry of a list or array of Python objects is an integer. Bools are not."""
    return all(
        isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in values
    )


def _joined_integers(values: Any, complaint: str) -> np.ndarray:
    """Python integers in one array of 64 bits.

    Args:
      values: at least one integer.
      complaint: beginning of the error message.

    Raises: TypeError: an integer does not fit 64 bits, or none of int64 and uint64 holds all.
    """
    numbers = [int(value) for value in values]
    largest = max(numbers, key=abs)
    if not -(2**63) <= min(numbers) <= max(numbers) < 2**64:
        raise TypeError(f"{complaint} {largest}; hash them.")
    signed = np.asarray([number for number in numbers if number < 2**63], np.int64)
    if signed.size == len(numbers):
        return signed
    # Raises if a negative number occurs together with one that needs uint64.
    _joined([signed, np.asarray([largest], np.uint64)])
    return np.asarray(numbers, np.uint64)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All ids in one array. Numpy alone would convert a mix of int64 and uint64 to floats.

    Raises: TypeError: a negative id occurs together with uint64 ids.
    """
    given = [array for array in arrays if array.size]
    dtypes = {array.dtype for array in given}
    if np.dtype(np.uint64) not in dtypes or len(dtypes) == 1:
        return np.concatenate(given or arrays) if arrays else np.zeros(0, np.int64)
    least, largest = (
        min(int(array.min()) for array in given),
        max(int(array.max()) for array in given),
    )
    if least < 0:
        raise TypeError(f"no integers of 64 bits hold both {least} and {largest}; hash the ids.")
    return np.concatenate([array.astype(np.uint64) for array in given])


def _floats(weights: PyTree, where: str) -> np.ndarray:
    check_unmasked(weights, f"{where}: weights")
    array = np.asarray(weights)
    if not (array.dtype.kind in "fiu" or jnp.issubdtype(array.dtype, np.floating)):
        raise TypeError(f"{where}: weights must be numbers, got {array.dtype}.")
    return array.astype(np.float32)


def as_bags(value: Any, *, feature: str) -> Bags:
    """Bags from any accepted form of input.

    Args:
      value: `Bags`, a dense array, nested lists, or a pair `(ids, weights)` of arrays or lists.
        Everything that numpy can read counts as an array: columns of pandas, polars and Arrow, and
        tensors in host memory. A column of lists has one bag per row.
      feature: name of the feature, for errors.

    Raises: TypeError, ValueError: the input is invalid. The message names the feature.
    """
    try:
        if isinstance(value, Bags):
            _check_arrays(value)
            return value
        ids, weights = map(
            foreign_to_numpy,
            value if isinstance(value, tuple) and len(value) == 2 else (value, None),
        )
        if isinstance(ids, np.ndarray) and ids.dtype == object and not np.ma.isMaskedArray(ids):
            ids = ids.tolist()
        given = jax.tree.leaves(weights)
        if any(
            isinstance(own, int) or jnp.issubdtype(getattr(own, "dtype", float), jnp.integer)
            for own in given
        ):
            raise TypeError(
                "a pair means (ids, weights), and weights must be floats; pass two samples as a list instead of a "
                "tuple, or convert the weights."
            )
        if not isinstance(weights, (list, tuple, jax.Array, np.ndarray, type(None))):
            raise TypeError(f"weights must be in the form of the ids, got {describe(weights)}.")
        if isinstance(ids, (Keys, jax.Array, np.ndarray)):
            check_unmasked(ids, "ids")
            if isinstance(ids, np.ndarray) and not jnp.issubdtype(ids.dtype, jnp.integer):
                raise TypeError(words_for_no_ids(ids))
            weights = _floats(weights, "a pair") if isinstance(weights, (list, tuple)) else weights
            return Bags.from_dense(ids, weights)
        if (
            isinstance(ids, list)
            and weights is None
            and (plain := bags_of_plain_rows(ids)) is not None
        ):
            return plain
        if isinstance(ids, (list, tuple)):
            if is_traced(ids):
                raise TypeError(
                    "inside jit ids are one array, not lists of them; call collection.prepare before jit."
                )
            if len(ids) and _are_integers(ids):
                array = _joined_integers(ids, "ids must fit 64 bits, got")
                return Bags.from_dense(
                    array, None if weights is None else _floats(weights, "a pair")
                )
            rows = [
                [row] if not isinstance(row, (list, tuple)) and np.ndim(row) == 0 else row
                for row in ids
            ]
            return Bags.from_lists(rows, cast(Any, weights))
    except (TypeError, ValueError, RuntimeError) as error:  # Torch raises RuntimeError.
        raise type(error)(f"feature {feature!r}: {error}") from error
    raise TypeError(
        f"feature {feature!r}: ids must be Bags, an integer array or lists, got {type(ids).__name__}."
    )


def foreign_to_numpy(value: Any) -> Any:
    """`value` as a numpy array if it has `__array__`, such as a tensor. Other values are unchanged.

    JAX and numpy arrays are unchanged, too.
    """
    if not hasattr(value, "__array__") or isinstance(value, (jax.Array, np.ndarray)):
        return value
    try:
        return np.asarray(value)
    except TypeError:
        # A torch tensor of bfloat16: numpy has no such dtype, but JAX has.
        if not hasattr(value, "__dlpack__"):
            raise
        return np.asarray(jnp.from_dlpack(value))


def _check_arrays(bags: Bags) -> None:
    """Checks the types and shapes of the fields.

    Raises:
      TypeError: a field is not an array, or has a wrong dtype.
      ValueError: ids have several axes, or `dense_shape` does not fit.
    """
    is_array = isinstance(bags.ids, (Keys, jax.Array, np.ndarray))
    if not is_array or not isinstance(bags.offsets, (jax.Array, np.ndarray)):
        name, found = ("ids", bags.ids) if not is_array else ("offsets", bags.offsets)
        raise TypeError(
            f"{name} of Bags must be an array, got {describe(found)}; Bags.from_lists makes Bags from lists."
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
        regular = np.arange(shape[0] + 1) * math.prod(shape[1:])
        if bags.ids.shape[0] != regular[-1] or not np.array_equal(
            np.asarray(bags.offsets), regular
        ):
            raise ValueError(
                f"dense_shape {shape} does not fit {bags.ids.shape[0]} ids in {bags.num_bags} bags."
            )
    if bags.weights is not None and not isinstance(bags.weights, jax.Array):
        check_type(bags.weights, Float[np.ndarray, "..."], "weights of Bags")


def padded_size(count: int) -> int:
    """The smallest power of two that is not below `count`; 0 for 0.

    Arrays of few different sizes need few compiled programs.
    """
    return 1 << (count - 1).bit_length() if count else 0


def size_of_list(count: int) -> int:
    """The smallest size of a fixed series that holds `count` ids.

    The series has the powers of two from 8 to 64, then eight sizes per octave, with at most 1/8
    padding. A stream of batches then needs few compiled programs.
    """
    if count <= 64:
        return max(padded_size(count), 8)
    step = 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


def common_width(bags: Bags) -> int:
    """Width of an array `[bags, ids]` that holds these bags and probably those of later batches.

    It is a power of two. If many bags all have one length, it is that length, because such a
    feature probably has a fixed length.
    """
    lengths = np.diff(np.asarray(bags.offsets))
    longest = int(lengths.max(initial=1))
    is_fixed = lengths.size >= FEWEST_OF_ONE_LENGTH and int(lengths.min()) == longest
    return longest if is_fixed else padded_size(longest)


def device_copy(array: PyTree, dtype: DTypeLike) -> Array:
    """The array on the device, as from `jnp.asarray`. A numpy array is copied first.

    Data loaders often write the next batch into the same memory. JAX may use the memory of a numpy
    array without a copy if it gets the array with a dtype. Without a dtype it copies, but with a
    program that is compiled for every shape.
    """
    return jnp.asarray(np.array(array, dtype) if isinstance(array, np.ndarray) else array, dtype)


def on_device(tree: PyTree) -> PyTree:
    """The tree with copies of numpy arrays on the device.

    They are copies, because data loaders often write the next batch into the same memory. The
    arrays are passed to a compiled function: for 26 arrays, this takes a third of the time of
    `device_put`.
    """
    if is_traced(tree):
        return tree
    leaves, form = jax.tree.flatten(tree)
    with jax.transfer_guard_host_to_device("allow"):  # The caller asked for this transfer.
        copies = iter(_returned([leaf for leaf in leaves if isinstance(leaf, np.ndarray)]))
    return jax.tree.unflatten(
        form, [next(copies) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    )


_returned = jax.jit(lambda arrays: arrays)


def cut_on_device(values: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Arrays of these shapes on the device, cut from one flat array that holds them in order."""
    with jax.transfer_guard_host_to_device("allow"):
        return _cut(values, shapes)


@functools.partial(jax.jit, static_argnums=1)
def _cut(values: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [
        own.reshape(shape) for own, shape in zip(jnp.split(values, ends[:-1]), shapes, strict=True)
    ]


def narrow_ids(ids: PyTree) -> PyTree:
    """Ids as int32. `Keys` are unchanged.

    An id that does not fit int32 becomes one that is outside every table, never another valid id.
    """
    if isinstance(ids, Keys):
        return ids
    xp: Any = np if isinstance(ids, np.ndarray) else jnp
    if ids.dtype.itemsize > 2 and ids.dtype != np.int32:
        lowest = 0 if xp.issubdtype(ids.dtype, xp.unsignedinteger) else PAD_ID - 1
        ids = xp.clip(ids, lowest, 2**31 - 1)
    return ids.astype(np.int32)


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf of the tree is traced, by `jit` or another transformation."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def check_not_taken(tree: PyTree, what: str, way_out: str) -> None:
    """Checks that no array of a tree was donated to a step.

    Args:
      tree: arrays that are to be used.
      what: beginning of the message, which says what is lost.
      way_out: end of the message, which says how to continue.

    Raises: RuntimeError: an array was deleted, because a step took it over.
    """
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    if any(not isinstance(array, jax.core.Tracer) and array.is_deleted() for array in arrays):
        raise RuntimeError(f"{what} to a step that took its arrays over: {way_out}.")


class _CtrlCLater:
    """Delays Ctrl-C until the end of a `with` block.

    It does nothing outside the main thread, because only the main thread gets Ctrl-C.
    """

    def __enter__(self) -> None:
        self._signals: list[tuple[int, Any]] = []
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, lambda *given: self._signals.append(given))

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._signals:
                self._handler(*self._signals[-1])


def kept(
    keep: Callable[[PyTree], None], program: Callable[..., PyTree], *operands: PyTree
) -> PyTree:
    """Result of a program that donates its operands, after `keep` has received it.

    Without this, Ctrl-C could raise KeyboardInterrupt after the program has run and before its
    result is assigned. The donated arrays would then be lost. Ctrl-C is delayed until the program
    is done, including its compilation.

    Args:
      keep: stores the result.
      program: the compiled program.
      *operands: its arguments.
    """
    with _CtrlCLater():
        result = program(*operands)
        keep(result)
    return result


def check_ids_dtype(bags: Bags, *, feature: str) -> None:
    """Raises: TypeError: ids are not integers."""
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
    """Checks bags that are not traced.

    Args:
      bags: ids, offsets and weights.
      feature: name of the feature, for errors.
      table: name of its table, for errors.
      vocabulary_size: rows of the table.
      allow_out_of_range: whether ids outside the table are allowed, False by default.
      way_to_drop: hint at the option that drops such ids. None if the caller has no such option.

    Raises: ValueError: an id is outside the table, offsets fall, or a weight is not finite. The
      message names the feature, the bag, the value, the table and the way out.
    """
    check_bags(bags, feature=feature)
    if allow_out_of_range:
        return
    offsets = np.asarray(bags.offsets)
    used = np.asarray(bags.ids)[: offsets[-1]]
    if not used.size or (int(used.min()) >= PAD_ID and int(used.max()) < vocabulary_size):
        return
    bad = (used != PAD_ID) & ((used < 0) | (used >= vocabulary_size))
    place = int(bad.argmax())
    bag = int(np.searchsorted(offsets, place, side="right")) - 1
    ways_out = f"enlarge the table, hash the ids first, or use {PAD_ID} for missing ids"
    if way_to_drop is not None:
        ways_out = (
            f"enlarge the table, hash the ids first, use {PAD_ID} for missing ids, or {way_to_drop}"
        )
    raise ValueError(
        f"feature {feature!r}: id {int(used[place])} in sample {bag} is outside table {table!r} with "
        f"vocabulary_size={vocabulary_size} ({int(bad.sum())} such ids in the batch); {ways_out}."
    )


def check_unmasked(value: Any, name: str) -> None:
    """Raises: TypeError: `value` or one of its rows is a masked array. Its mask would be lost."""
    is_object = isinstance(value, np.ndarray) and value.dtype.kind == "O"
    rows = value if isinstance(value, (list, tuple)) else value.flat if is_object else ()
    if np.ma.isMaskedArray(value) or any(map(np.ma.isMaskedArray, rows)):
        raise TypeError(
            f"{name} are in a masked array, whose mask has no meaning here; fill it, as in ids.filled(-1)."
        )


def check_bags(bags: Bags, *, feature: str) -> None:
    """Checks offsets and weights of bags that are not traced.

    Raises: ValueError: offsets fall, do not fit the ids or leave an id in no bag, or a weight is
      missing or not finite.
    """
    ids, offsets, num_ids = bags.ids, np.asarray(bags.offsets), bags.ids.shape[0]
    if bags.dense_shape is None:
        if (
            offsets.ndim != 1
            or offsets.size == 0
            or offsets[0] != 0
            or (np.diff(offsets) < 0).any()
        ):
            first = offsets[:8].tolist()
            raise ValueError(
                f"feature {feature!r}: offsets must start at 0 and never fall, got {first}..."
            )
        last = int(offsets[-1])
        if last > num_ids:
            raise ValueError(
                f"feature {feature!r}: the last offset is {last}, but there are {num_ids} ids."
            )
        is_id = (
            np.asarray(ids.is_key)[last:]
            if isinstance(ids, Keys)
            else np.asarray(ids)[last:] != PAD_ID
        )
        if is_id.any():  # Only padding may follow the last offset.
            raise ValueError(
                f"feature {feature!r}: the last offset is {last}, but there are {num_ids} ids, of which "
                f"{int(is_id.sum())} would be in no bag; end the offsets with the number of ids, or fill up with -1."
            )
    if bags.weights is not None:
        weights = np.asarray(bags.weights)
        if weights.shape != (num_ids,):
            raise ValueError(
                f"feature {feature!r}: {weights.size} weights for {num_ids} ids; give one per id."
            )
        finite = np.isfinite(weights[: offsets[-1]].astype(np.float32))
        if not finite.all():
            place = int(finite.argmin())
            bag = int(np.searchsorted(offsets, place, side="right")) - 1
            raise ValueError(
                f"feature {feature!r}: weight {float(weights[place])} in sample {bag} is not finite; clean the weights."
            )
