"""Rows on the host of which a device has some: how they are kept, exchanged, and known to belong to each other.

In the array of a device (`NearRows`), rows have the places of a cache and behind them a *scratch* area for rows that
found no place. Rows go back to the host when they are evicted or flushed; scratch rows after every update. What belongs
to a row, such as its optimizer state, lies in arrays beside it and travels with it; the last of these arrays says which
row is where.

The policy and the stores are Python on the host. Outside of `jit` they are called directly; inside, through ordered
callbacks with room for one row per id.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree
from numpy.typing import ArrayLike

from rsembed.bags import padded_size
from rsembed.caching.set_associative import Admission, SetAssociativeCache
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW

Rows = Int[np.ndarray, "..."]
FIRST_VALUES_BLOCK = 4096


class Generation:
    """Counts the changes that a host and a device make together, from a random number on.

    The state on the device carries the number, too. One of another time or of another owner, whose places hold other
    rows than the host believes, is noticed before it is used.

    Example:
      >>> generation = Generation("the state is of another time; begin anew.")
      >>> state = generation.number
      >>> generation.advance(state)
      >>> generation.check(state)
      Traceback (most recent call last):
        ...
      RuntimeError: the state is of another time; begin anew. (It has another generation than the host.)
    """

    def __init__(self, refusal: str):
        """`refusal` says what is wrong with a state of another generation, and the way out."""
        self.number, self._refusal = secrets.randbits(31), refusal

    def check(self, found: ArrayLike | None) -> None:
        """Raises: RuntimeError: a number is not the present one."""
        if (np.asarray(found) != self.number).any():
            raise RuntimeError(f"{self._refusal} (It has another generation than the host.)")

    def advance(self, found: ArrayLike | None) -> None:
        """Begins a change of host and device. Raises: as `check`."""
        self.check(found)
        self.number = (self.number + 1) % 2**32


class BackingStore:
    """The rows of an array and of what belongs to it, such as optimizer state; those that a device has may be stale.

    Attributes:
      arrays: the rows, changed in place.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        first_values: Callable[[Rows], Sequence[ArrayLike]] | None = None,
        near_dtype: DTypeLike | None = None,
    ):
        """A store of rows that were not written yet.

        Args:
          arrays: with equally many rows. Of zeros the system hands memory out as rows are first written.
          first_values: what rows hold in all arrays until they are written, which is made when they are read. It is
            called with few different numbers of rows, of which it may be asked again. None leaves it to `arrays`.
          near_dtype: what a device rounds the first array to, if it does. A number that comes back as it left keeps
            what the store has.
        """
        self.arrays, self._first_values, self._near_dtype = tuple(arrays), first_values, near_dtype
        self._is_written = np.zeros(0 if first_values is None else self.arrays[0].shape[0], bool)

    def read(self, rows: Rows) -> list[np.ndarray]:
        """Copies of rows of all arrays."""
        arrays = [array[rows] for array in self.arrays]
        if self._first_values is not None:
            fresh = np.flatnonzero(~self._is_written[rows])
            for start in range(0, fresh.size, FIRST_VALUES_BLOCK):
                some = fresh[start : start + FIRST_VALUES_BLOCK]
                padded = np.zeros(padded_size(some.size), np.int32)
                padded[: some.size] = rows[some]
                for array, values in zip(arrays, self._first_values(padded), strict=True):
                    array[some] = np.asarray(values)[: some.size]
        return arrays

    def write(self, rows: Rows, arrays: Sequence[ArrayLike]) -> None:
        """Replaces distinct rows of all arrays by the first of the values, which may be more."""
        own = [np.asarray(values)[: rows.size] for values in arrays]
        if self._near_dtype is not None:
            kept = self.arrays[0][rows]
            with np.errstate(over="ignore"):
                is_same = kept.astype(self._near_dtype).astype(kept.dtype) == own[0]
            own[0] = np.where(is_same, kept, own[0])
        for array, values in zip(self.arrays, own, strict=True):
            array[rows] = values
        if self._first_values is not None:
            self._is_written[rows] = True

    def exchange(self, left: Rows, arrays: Sequence[ArrayLike], come: Rows) -> list[np.ndarray]:
        """Writes rows that left the device, then reads those that come to it: they may be the same."""
        self.write(left, arrays)
        return self.read(come)


_scatter = jax.jit(api.scatter_rows, donate_argnums=0)
_ROWS_PER_FLUSH = 1 << 16
_nothing = functools.partial(np.zeros, 0, np.int64)
Leaving = Callable[[Int[Array, " places"]], Sequence[Array]]
"""From places to what the host keeps of their rows: all arrays but the last."""


class NearRows:
    """The host side of one array: who is near, where all rows are kept, and what the next exchange moves.

    Attributes:
      number: which array of a state.
      cache: the policy.
      backing: all rows.
      rows: those that the last batch asked for, by id: `cache.num_ids` or more if there is no such row, -1 for no id.
      places: of these rows, -1 for none.
      admission: what the cache did for the last batch, None if it was not asked to let rows in.
      scratch_rows: those of the last batch without a place in the cache.
    """

    def __init__(self, number: int, cache: SetAssociativeCache, backing: BackingStore):
        self.number, self.cache, self.backing = number, cache, backing
        self.rows = self.places = self.scratch_rows = _nothing()
        self.admission: Admission | None = None
        self._left = self._come = (_nothing(), _nothing())  # rows, and the places that they leave or take

    @property
    def num_places(self) -> int:
        """Number of places of the cache."""
        return self.cache.num_sets * self.cache.num_ways

    def find(
        self, rows: Int[np.ndarray, " nnz"], *, admit: bool, lock: bool = False, is_prefetch: bool = False
    ) -> None:
        """Finds rows a place; those that find none get one behind the cache, unless the batch is yet to come."""
        self.rows, self._left, self._come = rows, (_nothing(), _nothing()), (_nothing(), _nothing())
        self.admission, self.scratch_rows = None, _nothing()
        if admit:
            self.admission = own = self.cache.admit(rows, lock=lock)
            self.places, was_taken = own.locations, own.evicted_ids >= 0
            self._left = own.evicted_ids[was_taken], own.inserted_slots[was_taken]
            self._come = own.inserted_ids, own.inserted_slots
        else:
            self.places = self.cache.find(rows)
        if not is_prefetch:
            is_homeless = (self.places < 0) & (rows >= 0) & (rows < self.cache.num_ids)
            self.scratch_rows, inverse = np.unique(rows[is_homeless], return_inverse=True)
            self.places[is_homeless] = self.num_places + inverse
            behind = self.num_places + np.arange(self.scratch_rows.size)
            come, places = self._come
            self._come = np.concatenate([come, self.scratch_rows]), np.concatenate([places, behind])

    def moves(self, capacity: int | None) -> list[np.ndarray]:
        """The places that are left and filled, in `capacity` entries or, for None, in few different sizes."""
        return [_padded(places, capacity) for _, places in (self._left, self._come)]

    def bring(
        self, arrays: tuple[Array, ...], moves: Sequence[ArrayLike], leaving: Leaving, capacity: int | None
    ) -> tuple[Array, ...]:
        """The arrays after the moves, in which all rows of the last batch have places.

        Args:
          arrays: as much scratch area as the batch needs, or one of `capacity` ids may need, is added to them.
          moves: what `moves` returned, here or inside a compiled program.
          leaving: see there.
          capacity: of `moves`.
        """
        (left, come), shapes = map(jnp.asarray, moves), None
        if not come.size:  # rows leave for others only
            return arrays
        num_scratch = len(self.scratch_rows) if capacity is None else min(capacity, self.cache.num_ids)
        if self.num_places + num_scratch > arrays[0].shape[0]:
            missing = self.num_places + padded_size(num_scratch) - arrays[0].shape[0]
            arrays = tuple(jnp.concatenate([a, jnp.zeros((missing, *a.shape[1:]), a.dtype)]) for a in arrays)
        if capacity is not None:
            shapes = tuple(jax.ShapeDtypeStruct((capacity, *x.shape[1:]), x.dtype) for x in arrays)
        exchange = functools.partial(self._exchange, [array.dtype for array in arrays])
        loaded = call_host(exchange, shapes, come, *leaving(left))
        brought: tuple[Array, ...] = _scatter(arrays, come, tuple(loaded))
        return brought

    def _exchange(
        self, dtypes: Sequence[DTypeLike], places: Array | np.ndarray, *left: ArrayLike
    ) -> tuple[np.ndarray, ...]:
        """Writes rows that leave to the stores, then reads those that take places, padded as these are."""
        rows, room = self._come[0], places.shape[0] - self._come[0].size
        return tuple(
            np.concatenate([values.astype(dtype), np.zeros((room, *values.shape[1:]), dtype)])
            for values, dtype in zip([*self.backing.exchange(self._left[0], left, rows), rows], dtypes, strict=True)
        )

    def scratch(self, arrays: Sequence[Array], leaving: Leaving, *, is_inside: bool) -> Sequence[Array] | None:
        """Contents of the scratch area, for `store_scratch`; None if it is empty."""
        # The area may be larger than its rows: rows behind them are read and left alone.
        size = arrays[0].shape[0] - self.num_places if is_inside else padded_size(len(self.scratch_rows))
        return leaving(self.num_places + jnp.arange(size, dtype=jnp.int32)) if size else None

    def store_scratch(self, values: Sequence[ArrayLike] | None) -> None:
        """Keeps the scratch rows of the last batch."""
        if values is not None:
            self.backing.write(self.scratch_rows, values)

    def flush(self, leaving: Leaving) -> None:
        """Writes all resident rows to the stores; they stay resident."""
        rows, places = self.cache.resident()
        for first in range(0, rows.size, _ROWS_PER_FLUSH):
            some = slice(first, first + _ROWS_PER_FLUSH)
            self.backing.write(rows[some], leaving(jnp.asarray(_padded(places[some], None))))


def call_host(function: Callable[..., PyTree], shapes: PyTree, *operands: PyTree) -> PyTree:
    """Runs `function` on the host: now, or with result `shapes` in its turn inside a compiled program."""
    if shapes is None:
        return function(*operands)
    return io_callback(function, shapes, *operands, ordered=True)


def _padded(places: np.ndarray, size: int | None) -> np.ndarray:
    missing = (padded_size(places.size) if size is None else size) - places.size
    return np.concatenate([places, np.full(missing, NO_ROW, np.int64)]).astype(np.int32)
