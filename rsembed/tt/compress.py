"""Which compression of a trained table loses least: tensor trains beside their rivals, errors measured, none hidden."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.checks import validated
from rsembed.progress import progress
from rsembed.tt.checks import check_one_of
from rsembed.tt.cores import full_weight
from rsembed.tt.decomposition import from_dense, truncated
from rsembed.tt.spec import TTSpec

CODEWORDS = 256
KMEANS_ROUNDS = 8
KMEANS_ROWS = 16_384
"""Rows that codewords are fitted to."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Compressed:
    """One method's answer.

    Attributes:
      method: its name.
      num_bytes: all that a lookup needs: cores, codes, scales, ids of hot rows, permutations.
      relative_error: `norm(table - reconstruction) / norm(table)`, measured on the float32 reconstruction.
      seconds: what finding it took.
      ratio: bytes of the float32 table over `num_bytes`.
      fits: whether it keeps the given bytes or error.
      payload: the arrays; for "tt" the pair `(spec, cores)`, which `TTEmbeddingBag.set_cores` takes to train on.
      reconstruction: the table that lookups would see.
    """

    method: str
    num_bytes: int
    relative_error: float
    seconds: float
    ratio: float
    fits: bool
    payload: Any
    reconstruction: Float[np.ndarray, "vocab dim"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CompressionReport:
    """All methods, the best first: those that fit by error (or bytes), then the others.

    Printed, it is a table of ratio, error and seconds.
    """

    entries: tuple[Compressed, ...]

    @property
    def best(self) -> Compressed:
        """The best one; look at its `fits` and `relative_error`."""
        return self.entries[0]

    def __str__(self) -> str:
        lines = [f"{'method':<14}{'ratio':>8}{'error':>9}{'bytes':>12}{'seconds':>9}  fits"]
        for e in self.entries:
            lines.append(
                f"{e.method:<14}{e.ratio:>8.2f}{e.relative_error:>9.4f}{e.num_bytes:>12,}{e.seconds:>9.2f}  "
                f"{'yes' if e.fits else 'no'}"
            )
        return "\n".join(lines)


class _Task:
    """The table and what may be spent on it."""

    def __init__(self, table: np.ndarray, most_bytes: int | None, most_error: float | None, seed: int):
        self.table, self.most_bytes, self.most_error = table, most_bytes, most_error
        self.rows, self.dim = table.shape
        self.norm = float(np.linalg.norm(table))
        self.generator = np.random.default_rng(seed)

    def error(self, reconstruction: np.ndarray) -> float:
        return float(np.linalg.norm(self.table - reconstruction)) / self.norm if self.norm else 0.0


Answer = tuple[int, Any, np.ndarray]


@validated
def compress(
    table: Float[Array | np.ndarray, "vocab dim"],
    *,
    bytes: int | None = None,
    max_relative_error: float | None = None,
    row_weights: Float[np.ndarray, " vocab"] | None = None,
    seed: int = 0,
) -> CompressionReport:
    """Tries TT, TT with reordered rows, hot rows + TT, low rank, int8, int4 and product quantisation.

    A method whose smallest form exceeds the bytes is left out; those without a choice of size (int8, int4) are listed.
    Tensor trains are a way to train small tables, not a good way to shrink trained ones: expect low errors from
    quantisation. Training the cores on, see `fine_tune`, wins back a part.

    Args:
      table: float table.
      bytes: the best method is the one with the least error within so many bytes.
      max_relative_error: or: the one with the fewest bytes within this `norm(difference) / norm(table)`.
      row_weights: how hot a row is, such as its access count; None takes its norm.
      seed: of the rows that product quantisation is fitted to.

    Raises: ValueError: not exactly one of `bytes` and `max_relative_error`, or it is negative or not finite; the table
      is empty or not finite; or the weights are not one finite number per row.
    """
    check_one_of("compress", bytes=bytes, max_relative_error=max_relative_error)
    dense = np.asarray(table, np.float32)
    if not dense.size or not np.isfinite(dense).all():
        raise ValueError(f"the table of shape {dense.shape} must hold numbers, all of them finite.")
    task = _Task(dense, bytes, max_relative_error, seed)
    weights = np.linalg.norm(dense, axis=1) if row_weights is None else np.asarray(row_weights)
    if weights.shape != dense.shape[:1] or not np.isfinite(weights).all():
        raise ValueError(f"row_weights must be {len(dense)} finite numbers, one per row.")
    methods: dict[str, Callable[[], Answer | None]] = {
        "tt": lambda: _train(task, dense),
        "reordered tt": lambda: _reordered_train(task),
        "hot rows + tt": lambda: _hot_rows(task, weights),
        "low rank": lambda: _low_rank(task),
        "int8": lambda: _row_wise_integers(task, 8),
        "int4": lambda: _row_wise_integers(task, 4),
        "product codes": lambda: _product_codes(task),
    }
    entries = []
    for name, method in progress(methods.items(), description="compress", delay=1.0, leave=False):
        start = time.perf_counter()
        answer = method()
        if answer is None:  # not even its smallest form is within the bytes
            continue
        num_bytes, payload, reconstruction = answer
        error = task.error(reconstruction)
        entries.append(
            Compressed(
                method=name,
                num_bytes=num_bytes,
                relative_error=error,
                seconds=time.perf_counter() - start,
                ratio=dense.nbytes / num_bytes,
                fits=num_bytes <= bytes if bytes is not None else error <= (max_relative_error or 0.0),
                payload=payload,
                reconstruction=reconstruction,
            )
        )
    size_first = bytes is None
    entries.sort(key=lambda e: (not e.fits, e.num_bytes if size_first == e.fits else e.relative_error))
    return CompressionReport(entries=tuple(entries))


def _train(task: _Task, table: np.ndarray, used_bytes: int = 0, error: float | None = None) -> Answer | None:
    """Two cores; `used_bytes` are spent already."""
    if task.most_bytes is not None:
        try:
            TTSpec.for_budget(*table.shape, bytes=task.most_bytes - used_bytes, num_cores=2)
        except ValueError:
            return None
        spec, cores = from_dense(table, bytes=task.most_bytes - used_bytes)
    else:
        spec, cores = from_dense(
            table, max_relative_error=task.most_error if error is None else error, allow_larger=True
        )
    return used_bytes + spec.num_bytes(), (spec, cores), np.asarray(full_weight(spec, cores))


def _reordered_train(task: _Task) -> Answer | None:
    """Similar rows made neighbours, for 4 bytes a row."""
    order = _halved_order(task.table)
    answer = _train(task, task.table[order], used_bytes=4 * task.rows)
    if answer is None:
        return None
    num_bytes, payload, sorted_rows = answer
    reconstruction = np.empty_like(task.table)
    reconstruction[order] = sorted_rows
    return num_bytes, (order, payload), reconstruction


def _halved_order(table: np.ndarray, smallest: int = 8) -> Int[np.ndarray, " vocab"]:
    """Recursive halving along the direction of greatest variance."""
    order, pending = np.arange(len(table)), [(0, len(table))]
    while pending:
        start, stop = pending.pop()
        if stop - start <= smallest:
            continue
        part = table[order[start:stop]]
        centred = part - part.mean(0)
        direction = np.linalg.eigh(centred.T @ centred)[1][:, -1]
        order[start:stop] = order[start:stop][np.argsort(centred @ direction, kind="stable")]
        middle = (start + stop) // 2
        pending += [(start, middle), (middle, stop)]
    return order


def _hot_rows(task: _Task, weights: np.ndarray) -> Answer | None:
    """Half of the bytes (a tenth of the rows, when an error is given) for the hottest rows as they are."""
    row_bytes = 4 * task.dim + 4
    num_hot = task.rows // 10 if task.most_bytes is None else min(task.rows, task.most_bytes // 2 // row_bytes)
    hot = np.sort(np.argsort(-weights, kind="stable")[:num_hot])
    cold = task.table.copy()
    cold[hot] = 0.0
    cold_norm = float(np.linalg.norm(cold))
    error = None if task.most_error is None else min(1.0, task.most_error * task.norm / max(cold_norm, 1e-30))
    answer = _train(task, cold, used_bytes=num_hot * row_bytes, error=error)
    if answer is None:
        return None
    num_bytes, payload, reconstruction = answer
    reconstruction = reconstruction.copy()
    reconstruction[hot] = task.table[hot]
    return num_bytes, (hot, task.table[hot], payload), reconstruction


def _low_rank(task: _Task) -> Answer | None:
    per_rank = 4 * (task.rows + task.dim)
    rank = None if task.most_bytes is None else min(task.dim, task.most_bytes // per_rank)
    if rank == 0:
        return None
    left, right = truncated(task.table, rank, (task.most_error or 0.0) * task.norm)
    return left.shape[1] * per_rank, (left, right.T), left @ right


def _row_wise_integers(task: _Task, bits: int) -> Answer:
    """The size is what it is. Every row keeps its least value and its step."""
    low = task.table.min(1, keepdims=True)
    step = (task.table.max(1, keepdims=True) - low) / (2**bits - 1)
    codes = np.round((task.table - low) / np.where(step > 0, step, 1)).astype(np.uint8)
    num_bytes = task.rows * (math.ceil(task.dim * bits / 8) + 8)
    return num_bytes, (codes, low, step), low + step * codes


def _product_codes(task: _Task) -> Answer | None:
    """Columns in equal parts, each replaced by the nearest of 256 codewords: more parts, less error."""
    bytes_by_parts = {m: 4 * CODEWORDS * task.dim + task.rows * m for m in range(1, task.dim + 1) if task.dim % m == 0}
    tried = list(bytes_by_parts)
    if task.most_bytes is not None:
        tried = [m for m in tried if bytes_by_parts[m] <= task.most_bytes][-1:]  # the finest that fits
    answer = None
    for num_parts in tried:
        pieces = [_nearest_codewords(task, part) for part in np.split(task.table, num_parts, axis=1)]
        reconstruction = np.concatenate([words[codes] for codes, words in pieces], axis=1)
        answer = bytes_by_parts[num_parts], pieces, reconstruction
        if task.most_error is not None and task.error(reconstruction) <= task.most_error:
            break
    return answer


def _nearest_codewords(task: _Task, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and codewords, by Lloyd's algorithm on a sample of the rows."""
    sample = part[task.generator.permutation(task.rows)[:KMEANS_ROWS]]
    words = sample[:CODEWORDS].copy()

    def nearest(x: np.ndarray) -> np.ndarray:
        half = 0.5 * (words * words).sum(1)
        blocks = [np.argmax(x[k : k + 8192] @ words.T - half, axis=1) for k in range(0, len(x), 8192)]
        return np.concatenate(blocks).astype(np.uint8)

    for _ in range(KMEANS_ROUNDS):
        codes = nearest(sample)
        counts = np.bincount(codes, minlength=len(words))
        sums = np.zeros(words.shape, np.float64)
        np.add.at(sums, codes, sample)
        words = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], words).astype(np.float32)
    return nearest(part), words
