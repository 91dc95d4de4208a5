"""Ids in whatever form users have them, made into one canonical form: ids, offsets, weights."""

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
"""Stands for "no id" in dense arrays and behind the last bag; contributes nothing and is not counted as a mistake."""
FEWEST_OF_ONE_LENGTH = 16
"""Fewest bags whose equal lengths are taken for a fixed length, not for a coincidence."""


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bags:
    """Bags of ids: bag `b` holds `ids[offsets[b] : offsets[b + 1]]`.

    Args:
      ids: all ids, bag after bag, an integer array or `Keys`; places behind the last offset hold no id, -1.
      offsets: starts at 0 and never falls.
      weights: one per id; None means ones.
      dense_shape: shape of the array that the ids came from, which activations without a combiner take over.

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
        """Bags from rows of ids, one a bag: lists, tuples or one-dimensional arrays of any length (also empty).

        Raises:
          TypeError: a row is not a flat sequence of integers.
          ValueError: weights have other lengths than the ids.
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

        Raises: ValueError: a length is negative, or they do not add up to the number of ids. TypeError: lengths are no
          integers.
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
        """Bags from an array `[bags]` or `[bags, ids per bag]`; `-1` stands for no id. Works inside `jit`."""
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
        """Bags from coordinate lists in any order; ids of one sample keep their order.

        Raises: ValueError: a sample id lies outside `[0, num_samples)`, or the lists differ in length.
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
        """Bags from `indices [nnz, 2]` (sample, position), ids `values [nnz]` and `dense_shape` (samples, width)."""
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
        """Bags with room for `num_ids` ids, so that batches of different sizes share one compiled program.

        Raises: ValueError: there are already more ids than that.
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
    """Bags of several features in one pair of arrays; reads as a mapping from features to their `Bags`.

    This is the form of TorchRec's KeyedJaggedTensor: `rs.Jagged(kjt.values(), kjt.lengths(), features=kjt.keys())`.
    `collection.prepare` takes it, as every mapping. Nothing is copied before.

    Args:
      values: ids `[n]`, feature after feature, and in each feature sample after sample; a tensor in host memory, too.
      lengths: number of ids of each sample, `[features * samples]`, in the same order.
      features: names of the features.
      weights: one per id, floats `[n]`; None means ones.

    Its attributes are `features`, a tuple, and `bags`: the bags of all features as one `Bags`.

    Raises:
      TypeError: `values` or `lengths` are no arrays of integers, or weights no floats.
      ValueError: a feature is named twice, lengths are negative, do not divide by features or do not add up.

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
    """The module that computes with `ids`: numpy or jax.numpy."""
    return np if isinstance(jax.tree.leaves(ids)[0], np.ndarray) else jnp


def bags_of_plain_rows(rows: Sequence[PyTree]) -> Bags | None:
    """Bags of rows that are all lists of `int` or all arrays, read in one call, 20 times as fast; else None."""
    small = small_ids_of_lists(rows)
    if small is not None:
        ids, offsets = small
        return Bags(ids.astype(np.int64), offsets)
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        filled = [row for row in rows if row.size]  # an empty list makes an array of floats
        if {row.ndim for row in rows} != {1} or {row.dtype.kind for row in filled} != {"i"}:
            return None
        ids = np.concatenate(filled)
    else:
        flat = list(itertools.chain.from_iterable(rows)) if kinds == {list} else [None]
        if not set(map(type, flat)) <= {int}:
            return None
        try:
            ids = np.asarray(flat, np.int64)
        except OverflowError:  # some need 64 bits without a sign, or more
            return None
    return Bags.from_lengths(ids, np.fromiter(map(len, rows), np.int64, len(rows)))


_MARSHALLED = np.dtype([("kind", "u1"), ("value", "<i4")])


def small_ids_of_lists(rows: Sequence[PyTree]) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and offsets, int32, of a list of lists of `int` that fit 32 bits; None of anything else.

    `marshal` reads every object once, in C; numpy takes three passes to know types, values and
    lengths. In version 2 of its format a list is the letter "[" and its length, an integer of 32
    bits is "i" and its value: five bytes each. No other type has one of these letters; bool has
    "T" and "F". So all is well where only these two letters are there, and a list wherever a row
    begins. A later Python with another format gets None here, and its lists are read as before.
    """
    first_row = next(iter(rows), None)
    if type(rows) is not list or type(first_row) is not list:
        return None
    if first_row and (type(first_row[0]) is not int or first_row[0] >= 2**31):
        return None  # keys of 64 bits, in most cases, which would be written for nothing
    try:
        written = marshal.dumps(rows, 2)
    except ValueError:  # something that marshal does not write
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
    # The list of all rows comes first, and each row follows the ids of those before it.
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
        row = row.tolist()  # of which numpy makes integers, where all values are
    try:
        array = (
            np.asarray(row) if len(row) else np.zeros(0, np.int64)
        )  # an empty list would become float64
    except ValueError:  # lists of other lengths
        array = np.zeros((0, 0))
    if array.dtype.kind == "f" and all(
        isinstance(own, int) for own in row
    ):  # as large as only 64 bits without sign
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
    """Whether every entry of a list or array of Python objects is an integer; True and False are none."""
    return all(
        isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in values
    )


def _joined_integers(values: Any, complaint: str) -> np.ndarray:
    """Integers of Python in one array of 64 bits. Raises: TypeError: one does not fit; it follows `complaint`."""
    numbers = [int(value) for value in values]
    largest = max(numbers, key=abs)
    if not -(2**63) <= min(numbers) <= max(numbers) < 2**64:
        raise TypeError(f"{complaint} {largest}; hash them.")
    signed = np.asarray([number for number in numbers if number < 2**63], np.int64)
    if signed.size == len(numbers):
        return signed
    _joined(
        [signed, np.asarray([largest], np.uint64)]
    )  # refuses a negative number beside one of 64 bits
    return np.asarray(numbers, np.uint64)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All ids in one array; numpy alone would turn a mix of int64 and uint64 into floats."""
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
    """Bags from any accepted form: `Bags`, a dense array, nested lists, or a pair `(ids, weights)` of the latter.

    What numpy reads counts as an array: columns of pandas, polars and Arrow, of which a column of lists has a bag in
    each row, and tensors in host memory.

    Raises: TypeError or ValueError, naming the feature.
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
    except (TypeError, ValueError, RuntimeError) as error:  # the last is what torch raises
        raise type(error)(f"feature {feature!r}: {error}") from error
    raise TypeError(
        f"feature {feature!r}: ids must be Bags, an integer array or lists, got {type(ids).__name__}."
    )


def foreign_to_numpy(value: Any) -> Any:
    """`value` as a numpy array if it has `__array__`, as columns of pandas and tensors do; else `value` unchanged."""
    if not hasattr(value, "__array__") or isinstance(value, (jax.Array, np.ndarray)):
        return value
    try:
        return np.asarray(value)
    except TypeError:
        # A torch tensor of bfloat16, a dtype that numpy alone does not have.
        if not hasattr(value, "__dlpack__"):
            raise
        return np.asarray(jnp.from_dlpack(value))


def _check_arrays(bags: Bags) -> None:
    """Raises: TypeError: a field is not an array, or has a wrong dtype. ValueError: ids have several axes."""
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
    """The next power of two, 0 for 0: arrays of few sizes need few compiled programs."""
    return 1 << (count - 1).bit_length() if count else 0


def size_of_list(count: int) -> int:
    """The least size of a series that holds `count` ids, so that a stream of batches needs few compiled programs.

    Powers of two from 8 to 64, then eight sizes an octave, of which at most 1/8 stays empty.
    """
    if count <= 64:
        return max(padded_size(count), 8)
    step = 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


def common_width(bags: Bags) -> int:
    """Width of an array `[bags, ids]` that holds these bags, and probably those of later batches.

    A power of two; many bags of one length have that, as such a feature keeps its length.
    """
    lengths = np.diff(np.asarray(bags.offsets))
    longest = int(lengths.max(initial=1))
    is_fixed = lengths.size >= FEWEST_OF_ONE_LENGTH and int(lengths.min()) == longest
    return longest if is_fixed else padded_size(longest)


def device_copy(array: PyTree, dtype: DTypeLike) -> Array:
    """The array on the device, as from `jnp.asarray`; a numpy array is copied first.

    JAX may take over the memory of a numpy array that it is told the dtype of, and loaders write their batches into the
    same memory again; without a dtype it copies, by a program that is compiled for every shape.
    """
    return jnp.asarray(np.array(array, dtype) if isinstance(array, np.ndarray) else array, dtype)


def on_device(tree: PyTree) -> PyTree:
    """The tree with numpy's arrays on the device, copied: loaders write their batches into the same memory again.

    Arguments of a compiled function are copied in one go, in a third of the time that `device_put` takes for 26 arrays.
    """
    if is_traced(tree):
        return tree
    leaves, form = jax.tree.flatten(tree)
    with jax.transfer_guard_host_to_device("allow"):  # whoever prepares a batch asks for it
        copies = iter(_returned([leaf for leaf in leaves if isinstance(leaf, np.ndarray)]))
    return jax.tree.unflatten(
        form, [next(copies) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    )


_returned = jax.jit(lambda arrays: arrays)


def cut_on_device(values: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Arrays of these shapes on the device, from a flat array that holds one behind the other."""
    with jax.transfer_guard_host_to_device("allow"):
        return _cut(values, shapes)


@functools.partial(jax.jit, static_argnums=1)
def _cut(values: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [
        own.reshape(shape) for own, shape in zip(jnp.split(values, ends[:-1]), shapes, strict=True)
    ]


def narrow_ids(ids: PyTree) -> PyTree:
    """Ids as int32; an id that int32 cannot hold becomes one that no table has, never another valid one. Keys stay."""
    if isinstance(ids, Keys):
        return ids
    xp: Any = np if isinstance(ids, np.ndarray) else jnp
    if ids.dtype.itemsize > 2 and ids.dtype != np.int32:
        lowest = 0 if xp.issubdtype(ids.dtype, xp.unsignedinteger) else PAD_ID - 1
        ids = xp.clip(ids, lowest, 2**31 - 1)
    return ids.astype(np.int32)


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf of the tree is traced by `jit` or another transformation, so that its value is unknown."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def check_not_taken(tree: PyTree, what: str, way_out: str) -> None:
    """Raises: RuntimeError: a step took arrays over; the message says what is lost, and how to go on."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    if any(not isinstance(array, jax.core.Tracer) and array.is_deleted() for array in arrays):
        raise RuntimeError(f"{what} to a step that took its arrays over: {way_out}.")


class _CtrlCLater:
    """Holds Ctrl-C back until the end of a `with` block; in the main thread, where alone it arrives."""

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
    """Result of a program that takes arrays over; `keep` has received it before Ctrl-C can come in between.

    Without that, KeyboardInterrupt could be raised between the program and the assignment of its result, and the arrays
    that the program has taken over would be lost for good. Ctrl-C waits for the program, and for its compilation.
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
    """Checks concrete bags on the host.

    Args:
      bags: ids, offsets and weights.
      feature: name of the feature, for messages.
      table: name of its table, for messages.
      vocabulary_size: rows of the table.
      allow_out_of_range: whether ids outside the table are admitted.
      way_to_drop: words for the option that drops such ids; None where the caller offers none.

    Raises: ValueError: an id lies outside the table, offsets are not increasing, or a weight is not finite. The
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
    """Raises: TypeError: `value` is a masked array or has one among its rows, whose mask would be lost."""
    is_object = isinstance(value, np.ndarray) and value.dtype.kind == "O"
    rows = value if isinstance(value, (list, tuple)) else value.flat if is_object else ()
    if np.ma.isMaskedArray(value) or any(map(np.ma.isMaskedArray, rows)):
        raise TypeError(
            f"{name} are in a masked array, whose mask has no meaning here; fill it, as in ids.filled(-1)."
        )


def check_bags(bags: Bags, *, feature: str) -> None:
    """Checks offsets and weights of concrete bags. Raises: ValueError: offsets decrease, or a weight is not finite."""
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
        if is_id.any():  # behind the last offset only room for ids may be
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
