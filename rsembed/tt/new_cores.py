"""Cores that are new: drawn at random, found for a table that exists already, cut to lower ranks, or tensorly's.

Tables are decomposed on the host in NumPy. Of tensorly only the NumPy backend is used, imported where it is needed: its
JAX backend would switch the whole process to 64 bits.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from rsembed.checks import NonNegativeInt, dtype_among, validated
from rsembed.progress import progress
from rsembed.tt.cores import AnyCores, Cores, check_cores
from rsembed.tt.spec import CORE_DTYPES, Integers, TTSpec, check_one_of

WeightDistribution = Literal["normal", "uniform", "approx-normal", "approx-uniform", "naive-uniform"]
RelativeError = Annotated[float, "[0, inf)"]


def target_std(spec: TTSpec) -> float:
    """Standard deviation of the table's entries: that of the uniform distribution on `±1/sqrt(num_embeddings)`.

    Source: Yin et al. (2021), "TT-Rec", section on initialisation.
    """
    return 1 / math.sqrt(3 * spec.num_embeddings)


def core_std(spec: TTSpec) -> float:
    """Standard deviation of independent core entries that gives the table `target_std`, for any cores and ranks.

    An entry of the table is a sum over all inner places of products of `d` core entries.
    """
    return (target_std(spec) ** 2 / math.prod(spec.tt_ranks)) ** (1 / (2 * spec.num_cores))


@validated
def init_cores(
    key: PRNGKeyArray, spec: TTSpec, weight_dist: WeightDistribution = "normal", *, dtype: Any = jnp.float32
) -> tuple[Array, ...]:
    """Random cores.

    Args:
      key: equal keys give equal cores.
      spec: the table.
      weight_dist: of the cores: "normal" or "uniform", independent entries of mean zero and standard deviation
        `core_std`. Of the table: "approx-normal", exactly normal entries for up to three cores; "approx-uniform",
        uniform ones, uncorrelated, closer the larger the ranks (at least 2). All four give the table the standard
        deviation `target_std`. "naive-uniform" draws cores from `[0, 1/sqrt(num_embeddings)]`, as published; its table
        is nearly zero, which is warned about.
      dtype: of the cores.

    Raises: ValueError: the distribution is unknown, or the ranks are too small for it.
    """
    dtype_among(CORE_DTYPES, dtype, "init_cores: dtype")
    std = core_std(spec)
    if weight_dist in ("normal", "approx-normal"):
        cores = _split(spec, std * jax.random.normal(key, (spec.num_params,)))
        if weight_dist == "approx-normal":
            # A normal matrix between two vectors of fixed lengths makes a normal entry, and not a product of normals.
            cores[0] = _with_rms(cores[0], std, axis=3)
            if spec.num_cores > 2:
                cores[-1] = _with_rms(cores[-1], std, axis=1)
    elif weight_dist == "uniform":
        bound = std * math.sqrt(3)
        cores = _split(spec, jax.random.uniform(key, (spec.num_params,), minval=-bound, maxval=bound))
    elif weight_dist == "naive-uniform":
        warnings.warn(
            "weight_dist='naive-uniform' makes a table of nearly equal, nearly zero rows that trains slowly; "
            "'uniform' has the standard deviation of the published target.",
            stacklevel=2,
        )
        cores = _split(spec, jax.random.uniform(key, (spec.num_params,), maxval=1 / math.sqrt(spec.num_embeddings)))
    else:
        cores = _triangle_wave_cores(key, spec)
    return tuple(core.reshape(shape).astype(dtype) for core, shape in zip(cores, spec.core_shapes, strict=True))


def _split(spec: TTSpec, numbers: Array) -> list[Array]:
    """One random draw for all cores, cut into arrays `[p, R_left, q, R_right]`."""
    cuts = list(itertools.accumulate(p * size for p, size in spec.core_shapes))
    shapes = [(p, *shape) for p, shape in zip(spec.tt_p_shapes, spec.slice_shapes, strict=True)]
    return [part.reshape(shape) for part, shape in zip(jnp.split(numbers, cuts[:-1]), shapes, strict=True)]


def _with_rms(x: Array, rms: float, axis: int) -> Array:
    """Vectors along `axis` rescaled so that the root of their mean square is `rms`."""
    return x * (rms * jax.lax.rsqrt(jnp.mean(x * x, axis=axis, keepdims=True)))


def _triangle_wave_cores(key: PRNGKeyArray, spec: TTSpec) -> list[Array]:
    """The triangle wave of the sum of one random angle per core, which is uniform, as a train of its Fourier series.

    Two different entries of the table share at most some of their angles, so they are uncorrelated. Core `t` turns the
    pair `(cos, sin)` of every harmonic by its angle, which takes two ranks a harmonic. Noise of a hundredth keeps
    unused ranks alive.
    """
    if min(spec.tt_ranks) < 2:
        raise ValueError(
            f"weight_dist='approx-uniform' needs ranks of at least 2, got {list(spec.tt_ranks)}; 'approx-normal' works "
            "with any."
        )
    d, num_harmonics = spec.num_cores, min(spec.tt_ranks) // 2
    k = (2 * jnp.arange(num_harmonics, dtype=jnp.float32) + 1)[None, None, None, :]
    amplitudes = (8 / (jnp.pi * k) ** 2 / math.sqrt(spec.num_embeddings)) ** (1 / d)
    angle_key, noise_key = jax.random.split(key)
    noises = _split(spec, 0.01 * jax.random.normal(noise_key, (spec.num_params,)))
    num_angles = [p * q for p, q in zip(spec.tt_p_shapes, spec.tt_q_shapes, strict=True)]
    all_angles = jax.random.uniform(angle_key, (sum(num_angles),), maxval=2 * jnp.pi)
    core_angles = jnp.split(all_angles, list(itertools.accumulate(num_angles))[:-1])
    cores = []
    for t, (p, (left, q, right)) in enumerate(zip(spec.tt_p_shapes, spec.slice_shapes, strict=True)):
        angles = core_angles[t].reshape(p, 1, q, 1) * k
        cos, sin = amplitudes * jnp.cos(angles), amplitudes * jnp.sin(angles)
        # [p, in, q, harmonic, out]
        turn = jnp.stack([jnp.stack([cos, sin], -1), jnp.stack([-sin, cos], -1)], 1).reshape(p, 2, q, num_harmonics, 2)
        if t == 0:
            core = turn[:, :1].reshape(p, 1, q, -1)
        elif t == d - 1:
            core = turn[..., 0].transpose(0, 3, 1, 2).reshape(p, -1, q, 1)
        else:
            diagonal = jnp.eye(num_harmonics)[None, :, None, None, :, None]
            core = (turn[:, None] * diagonal).reshape(p, 2 * num_harmonics, q, 2 * num_harmonics)
        core = jnp.pad(core, [(0, 0), (0, left - core.shape[1]), (0, 0), (0, right - core.shape[3])])
        cores.append(core + jnp.sqrt(jnp.mean(core * core)) * noises[t])
    return cores


@validated
def from_dense(
    table: Float[Array | np.ndarray, "vocab dim"],
    *,
    ranks: Integers | int | np.integer | None = None,
    max_relative_error: RelativeError | None = None,
    bytes: NonNegativeInt | None = None,
    num_cores: int = 2,
    tt_p_shapes: Integers | None = None,
    tt_q_shapes: Integers | None = None,
    dtype: Any = jnp.float32,
) -> tuple[TTSpec, Cores]:
    """The cores of a tensor train close to a table, by TT-SVD.

    A trained table is seldom close to a small tensor train. Train the cores on to win some of it back: `set_cores` of a
    `TTEmbeddingBag` takes them.

    Args:
      table: float table.
      ranks: inner ranks, or one for all boundaries; a rank above what the table needs is lowered.
      max_relative_error: or: the largest `norm(table - train) / norm(table)`; ranks follow.
      bytes: or: the bytes of all cores; factors and ranks are those of `TTSpec.for_budget`.
      num_cores: unless factors are given.
      tt_p_shapes: row factors; None takes `suggested_tt_shapes`.
      tt_q_shapes: column factors; None takes `suggested_tt_shapes`.
      dtype: of the cores.

    Raises: ValueError: not exactly one of `ranks`, `max_relative_error` and `bytes`, or the error is negative or not
      finite, or needs cores larger than the table, or the table is not finite.
    Source: Oseledets (2011), "Tensor-train decomposition", algorithm 1.
    """
    check_one_of("from_dense", ranks=ranks, max_relative_error=max_relative_error, bytes=bytes)
    dense = np.asarray(table, np.float32)
    if not dense.size or not np.isfinite(dense).all():
        raise ValueError(f"the table of shape {dense.shape} must hold numbers that are finite; clean it before.")
    rows, dim = dense.shape
    if bytes is not None:
        spec = TTSpec.for_budget(rows, dim, bytes=bytes, num_cores=num_cores, dtype=dtype)
        tt_p_shapes, tt_q_shapes, ranks = spec.tt_p_shapes, spec.tt_q_shapes, spec.tt_ranks
    given = [shapes for shapes in (tt_p_shapes, tt_q_shapes) if shapes is not None]
    d = len(given[0]) if given else num_cores if ranks is None or np.ndim(ranks) == 0 else np.size(ranks) + 1
    caps = _ranks_of(ranks, d)
    spec = TTSpec.suggest(rows, dim, caps or [1] * (d - 1), tt_p_shapes, tt_q_shapes)
    p, q = spec.tt_p_shapes, spec.tt_q_shapes
    padded = np.zeros((math.prod(p), dim), np.float32)
    padded[:rows] = dense
    # An axis per digit, of which those of row and column take turns.
    remainder = padded.reshape(*p, *q).transpose([axis for t in range(d) for axis in (t, d + t)]).reshape(1, -1)
    tail = (max_relative_error or 0.0) * float(np.linalg.norm(dense)) / math.sqrt(d - 1)
    cores = []
    for t in progress(range(d - 1), description="TT-SVD", delay=1.0, leave=False):
        left = remainder.shape[0]
        basis, remainder = _truncated(remainder.reshape(left * p[t] * q[t], -1), caps[t] if caps else None, tail)
        cores.append(basis.reshape(left, p[t], q[t], -1))
    cores.append(remainder.reshape(-1, p[-1], q[-1], 1))
    if max_relative_error is not None and (size := sum(core.size for core in cores)) > dense.size:
        raise ValueError(
            f"max_relative_error={max_relative_error} needs {size} numbers in cores, more than the {dense.size} of the "
            "table: it is not close to a small train. Allow a larger error, or say ranks."
        )
    return _stored(rows, cores, dtype)


@validated
def round_cores(
    spec: TTSpec,
    cores: AnyCores,
    *,
    ranks: Integers | int | np.integer | None = None,
    max_relative_error: RelativeError | None = None,
) -> tuple[TTSpec, Cores]:
    """A table at lower ranks, from its cores alone; the table is never built.

    The error is that of the padded table, of all `prod(tt_p_shapes)` rows.

    Args:
      spec: the table.
      cores: its cores.
      ranks: inner ranks at most, or one for all boundaries.
      max_relative_error: or: what the padded table may lose, relative to its norm.

    Raises: ValueError: not exactly one of `ranks` and `max_relative_error`, the error is negative or not finite, or
      there are too many ranks or too few.
    Source: Oseledets (2011), "Tensor-train decomposition", algorithm 2.
    """
    check_one_of("round_cores", ranks=ranks, max_relative_error=max_relative_error)
    caps = _ranks_of(ranks, spec.num_cores)
    if caps is not None and len(caps) != spec.num_cores - 1:
        raise ValueError(f"ranks: {list(caps)} are not one for each boundary of {spec.num_cores} cores.")
    arrays = check_cores(spec, cores)
    parts = [core.astype(np.float64) for core in _unstored(spec, arrays)]
    for t in range(spec.num_cores - 1, 0, -1):  # rows of every core but the first become orthonormal
        left, p, q, right = parts[t].shape
        basis, factor = np.linalg.qr(parts[t].reshape(left, -1).T)
        parts[t] = basis.T.reshape(-1, p, q, right)
        parts[t - 1] = parts[t - 1] @ factor.T
    tail = (max_relative_error or 0.0) * float(np.linalg.norm(parts[0])) / math.sqrt(spec.num_cores - 1)
    for t in progress(range(spec.num_cores - 1), description="rounding", delay=1.0, leave=False):
        left, p, q, right = parts[t].shape
        basis, rest = _truncated(parts[t].reshape(-1, right), caps[t] if caps else None, tail)
        parts[t] = basis.reshape(left, p, q, -1)
        parts[t + 1] = np.tensordot(rest, parts[t + 1], 1)
    return _stored(spec.num_embeddings, parts, arrays[0].dtype)


def _ranks_of(ranks: Integers | int | np.integer | None, num_cores: int) -> list[int] | None:
    """One rank per boundary, of one for all or one each."""
    if ranks is None:
        return None
    values: list[int] = np.atleast_1d(ranks).tolist()
    return values * (num_cores - 1) if np.ndim(ranks) == 0 else values


def nearest_cores(spec: TTSpec, table: Float[Array | np.ndarray, "vocab dim"], dtype: DTypeLike = jnp.float32) -> Cores:
    """Cores of a given train close to a table, see `from_dense`; ranks above its need are filled with zeros."""
    found, cores = from_dense(
        table, ranks=spec.tt_ranks, tt_p_shapes=spec.tt_p_shapes, tt_q_shapes=spec.tt_q_shapes, dtype=dtype
    )
    ranks = (1, *spec.tt_ranks, 1)
    parts = [
        np.pad(part, ((0, ranks[t] - part.shape[0]), (0, 0), (0, 0), (0, ranks[t + 1] - part.shape[3])))
        for t, part in enumerate(_unstored(found, cores))
    ]
    return _stored(spec.num_embeddings, parts, dtype)[1]


def to_tensorly(spec: TTSpec, cores: AnyCores) -> Any:
    """A `tensorly.tt_matrix.TTMatrix` of NumPy cores `[R_{t-1}, p_t, q_t, R_t]`."""
    import tensorly
    from tensorly.tt_matrix import TTMatrix

    with tensorly.backend_context("numpy"):
        return TTMatrix(_unstored(spec, check_cores(spec, cores)))


def from_tensorly(
    tt_matrix: object, num_embeddings: int | None = None, *, dtype: Any = jnp.float32
) -> tuple[TTSpec, Cores]:
    """Spec and cores of a `TTMatrix`, or of any sequence of arrays `[R_{t-1}, p_t, q_t, R_t]`.

    Args:
      tt_matrix: what to read.
      num_embeddings: rows of the table when fewer than the row factors make.
      dtype: of the cores.

    Raises: ValueError: the arrays have other axes, or `dtype` is none of cores.
    """
    parts = [np.asarray(core) for core in (tt_matrix if np.iterable(tt_matrix) else [tt_matrix])]
    if not parts or any(part.ndim != 4 for part in parts):
        shapes = [part.shape for part in parts]
        raise ValueError(f"from_tensorly: cores must be arrays [R, p, q, R], got shapes {shapes}.")
    num_rows = math.prod(core.shape[1] for core in parts) if num_embeddings is None else num_embeddings
    return _stored(num_rows, parts, dtype)


def _truncated(matrix: np.ndarray, rank: int | None, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """`basis @ rest` close to the matrix: at most `rank` columns, or as few as leave out at most the norm `tail`."""
    basis, values, rest = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    discarded = np.sqrt(np.cumsum(values[::-1] ** 2))
    least = max(1, values.size - int(np.searchsorted(discarded, tail, side="right")))
    kept = least if rank is None else min(rank, values.size)
    return basis[:, :kept].astype(matrix.dtype), (values[:kept, None] * rest[:kept]).astype(matrix.dtype)


def _unstored(spec: TTSpec, cores: Cores) -> list[np.ndarray]:
    """Cores `[R_{t-1}, p_t, q_t, R_t]`, as tensorly has them."""
    shapes = zip(cores, spec.tt_p_shapes, spec.slice_shapes, strict=True)
    return [np.asarray(core, np.float32).reshape(p, *shape).transpose(1, 0, 2, 3) for core, p, shape in shapes]


def _stored(num_embeddings: int, parts: Sequence[np.ndarray], dtype: DTypeLike) -> tuple[TTSpec, Cores]:
    dtype_among(CORE_DTYPES, dtype, "dtype")
    p, q = (tuple(part.shape[axis] for part in parts) for axis in (1, 2))
    spec = TTSpec(num_embeddings, p, q, tuple(part.shape[3] for part in parts[:-1]))
    arrays = (part.transpose(1, 0, 2, 3).reshape(shape) for part, shape in zip(parts, spec.core_shapes, strict=True))
    return spec, tuple(jnp.asarray(array, dtype) for array in arrays)
