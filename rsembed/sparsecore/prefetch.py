"""Batches prepared ahead: while a step trains on batch n, a thread prepares batch n+1."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from rsembed.checks import validated

Batch = TypeVar("Batch")
Prepared = TypeVar("Prepared")


class Prefetcher(Iterator[Prepared], Generic[Prepared]):
    """The iterator that `prefetch` returns; also a context manager that ends its thread."""

    def __init__(self, batches: Iterable[Any], function: Callable[[Any], Prepared], depth: int) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rsembed-prefetch")
        # The thread must not refer to self: a prefetcher that is dropped unfinished then ends its executor's thread.
        self._prepare_next = functools.partial(next, _prepared(iter(batches), function), ())
        self._depth = depth
        self._pending: collections.deque[concurrent.futures.Future[tuple[()] | tuple[Prepared]]] = collections.deque()
        self._is_open = True
        self._run_ahead()

    def _run_ahead(self) -> None:
        while len(self._pending) < self._depth:
            self._pending.append(self._executor.submit(self._prepare_next))

    def __next__(self) -> Prepared:
        if not self._is_open:
            raise StopIteration
        is_handed_out = False
        try:
            prepared = self._pending[0].result()
            if not prepared:
                raise StopIteration
            self._pending.popleft()
            self._run_ahead()
            is_handed_out = True
            return prepared[0]
        finally:
            if not is_handed_out:
                self.close()

    def close(self) -> None:
        """Ends the thread after the batch it is working on; batches that were not handed out are lost."""
        self._is_open = False
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> Prefetcher[Prepared]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@validated
def prefetch(
    batches: Iterable[Batch], function: Callable[[Batch], Prepared], *, depth: int = 2
) -> Prefetcher[Prepared]:
    """`map(function, batches)`, computed by a thread that runs ahead of whoever consumes it.

    One thread reads the batches and calls `function`, so both happen in order. It helps as far as `function` lets
    others run meanwhile: the native partitioner releases Python's lock, plain Python code does not. Settings that JAX
    keeps per thread (`jax.default_device`, a mesh) are not those of the caller.

    Args:
      batches: what to prepare; the thread reads it, so nobody else should at the same time. It may be endless.
      function: prepares one batch, usually by `preprocess_sparse_dense_matmul_input`.
      depth: batches prepared, or in preparation, beyond the one handed out last. One hides a preparation that never
        takes longer than a step; raise it if some do, at the cost of the memory of so many batches.

    Returns:
      An iterator. What `batches` or `function` raises is raised in place of that batch, after those before it, and
      ends the iteration. The thread ends with the iteration, with `close()`, with the `with` block, or when the
      iterator is dropped.

    Raises:
      ValueError: `depth` is less than one.

    Example:
      >>> from rsembed.sparsecore.prefetch import prefetch
      >>> with prefetch([[1, 2], [3, 4]], sum) as totals:
      ...     print(*totals)
      3 7
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}; without prefetching, use map().")
    return Prefetcher(batches, function, depth)


def _prepared(batches: Iterator[Batch], function: Callable[[Batch], Prepared]) -> Iterator[tuple[Prepared]]:
    """Prepared batches, each in a tuple. A generator ends with an error, so nothing behind one is read."""
    yield from zip(map(function, batches))
