"""Cores that are new: drawn at random, found for a table that exists already, cut to lower ranks, or tensorly's.

Tables are decomposed on the host in NumPy. Of tensorly only the NumPy backend is used, imported where it is needed: its
JAX backend would switch the whole process to 64 bits.
"""

from __future__ import annotations

import dataclasses
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

from rsembed.checks import check_finite, dtype_among, validated
from rsembed.progress import progress
from rsembed.tt.cores import AnyCores, Cores, check_cores
from rsembed.tt.spec import CORE_DTYPES, Integers, TTSpec

WeightDistribution = Literal["normal", "uniform", "approx-normal", "approx-uniform", "naive-uniform"]
RelativeError = Annotated[float, "[0, inf)"]


@validated
def init_cores(
    key: PRNGKeyArray, spec: TTSpec, weight_dist: WeightDistribution = "normal", *, dtype: Any = jnp.float32
) -> tuple[Array, ...]:
    """Random cores.

    Args:
      key: equal keys give equal cores.
      spec: the table.
      weight_dist: of the cores: "normal" or "uniform", independent entries of mean zero and standard deviation
        that follows. Of the table: "approx-normal", exactly normal entries for up to three cores; "approx-uniform",
        uniform ones, uncorrelated, closer the larger the ranks (at least 2). All four give the table the standard
        deviation of the uniform distribution on `±1/sqrt(num_embeddings)`. "naive-uniform" draws cores from
        `[0, 1/sqrt(num_embeddings)]`, as published; its table is nearly zero, which is warned about.
      dtype: of the cores.

    Raises: ValueError: the distribution is unknown, or the ranks are too small for it.
    Source: Yin et al. (2021), "TT-Rec", section on initialisation.
    """
    dtype_among(CORE_DTYPES, dtype, "init_cores: dtype")
    # An entry of the table is a sum over all inner places of products of one entry per core.
    table_std = 1 / math.sqrt(3 * spec.num_embeddings)
    std = (table_std**2 / math.prod(spec.tt_ranks)) ** (1 / (2 * spec.num_cores))
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
def from_dense(spec: TTSpec, table: Float[Array | np.ndarray, "vocab dim"], *, dtype: Any = jnp.float32) -> Cores:
    """Cores whose table is close to a given one, by TT-SVD.

    A trained table is seldom close to a small tensor train. Train the cores on to win some of it back: `set_cores` of a
    `TTEmbeddingBag` takes them.

    Args:
      spec: factors and ranks, such as those of `TTSpec.suggest` or `TTSpec.for_budget`; what a rank has above the need
        of the table is zeros. At `max_ranks` the train is exact, and `round_cores` lowers ranks to an error.
      table: float table.
      dtype: of the cores.

    Raises: ValueError: the table has another shape, or is not finite.
    Source: Oseledets (2011), "Tensor-train decomposition", algorithm 1.
    """
    dense, (p, q, d) = np.asarray(table, np.float32), (spec.tt_p_shapes, spec.tt_q_shapes, spec.num_cores)
    if dense.shape != (spec.num_embeddings, spec.embedding_dim):
        raise ValueError(
            f"the table of shape {dense.shape} must hold {spec.num_embeddings} x {spec.embedding_dim} numbers; choose "
            "another spec."
        )
    check_finite(dense, "from_dense: the table", way_out="clean it before")
    padded = np.zeros((math.prod(p), spec.embedding_dim), np.float32)
    padded[: spec.num_embeddings] = dense
    # An axis per digit, of which those of row and column take turns.
    remainder = padded.reshape(*p, *q).transpose([axis for t in range(d) for axis in (t, d + t)]).reshape(1, -1)
    cores = []
    for t in progress(range(d - 1), description="TT-SVD", delay=1.0, leave=False):
        left = remainder.shape[0]
        basis, remainder = _truncated(remainder.reshape(left * p[t] * q[t], -1), spec.tt_ranks[t], 0.0)
        cores.append(basis.reshape(left, p[t], q[t], -1))
    return _stored(spec, [*cores, remainder.reshape(-1, p[-1], q[-1], 1)], dtype)


@validated
def round_cores(
    spec: TTSpec, cores: AnyCores, *, ranks: Integers | None = None, max_relative_error: RelativeError = 0.0
) -> tuple[TTSpec, Cores]:
    """A table at lower ranks, from its cores alone; the table is never built.

    The error is that of the padded table, of all `prod(tt_p_shapes)` rows.

    Args:
      spec: the table.
      cores: its cores.
      ranks: inner ranks at most, one per boundary between cores.
      max_relative_error: what the padded table may lose, relative to its norm, where `ranks` leave it that much.

    Raises: ValueError: the error is negative or not finite, or there are too many ranks or too few.
    Source: Oseledets (2011), "Tensor-train decomposition", algorithm 2.
    """
    arrays = check_cores(spec, cores)
    caps = spec.tt_ranks if ranks is None else dataclasses.replace(spec, tt_ranks=tuple(ranks)).tt_ranks
    parts = [core.astype(np.float64) for core in _unstored(spec, arrays)]
    for t in range(spec.num_cores - 1, 0, -1):  # rows of every core but the first become orthonormal
        left, p, q, right = parts[t].shape
        basis, factor = np.linalg.qr(parts[t].reshape(left, -1).T)
        parts[t] = basis.T.reshape(-1, p, q, right)
        parts[t - 1] = parts[t - 1] @ factor.T
    tail = max_relative_error * float(np.linalg.norm(parts[0])) / math.sqrt(spec.num_cores - 1)
    for t in progress(range(spec.num_cores - 1), description="rounding", delay=1.0, leave=False):
        left, p, q, right = parts[t].shape
        basis, rest = _truncated(parts[t].reshape(-1, right), caps[t], tail)
        parts[t] = basis.reshape(left, p, q, -1)
        parts[t + 1] = np.tensordot(rest, parts[t + 1], 1)
    rounded = dataclasses.replace(spec, tt_ranks=tuple(part.shape[3] for part in parts[:-1]))
    return rounded, _stored(rounded, parts, arrays[0].dtype)


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
    _, p, q, ranks = zip(*(part.shape for part in parts), strict=True)
    spec = TTSpec(math.prod(p) if num_embeddings is None else num_embeddings, p, q, ranks[:-1])
    return spec, _stored(spec, parts, dtype)


def _truncated(matrix: np.ndarray, rank: int, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """`basis @ rest` close to the matrix: at most `rank` columns, and as few as leave out less than the norm `tail`."""
    basis, values, rest = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    num_small = int(np.searchsorted(np.sqrt(np.cumsum(values[::-1] ** 2)), tail))
    kept = max(1, min(rank, values.size - num_small))
    return basis[:, :kept].astype(matrix.dtype), (values[:kept, None] * rest[:kept]).astype(matrix.dtype)


def _unstored(spec: TTSpec, cores: Cores) -> list[np.ndarray]:
    """Cores `[R_{t-1}, p_t, q_t, R_t]`, as tensorly has them."""
    shapes = zip(cores, spec.tt_p_shapes, spec.slice_shapes, strict=True)
    return [np.asarray(core, np.float32).reshape(p, *shape).transpose(1, 0, 2, 3) for core, p, shape in shapes]


def _stored(spec: TTSpec, parts: Sequence[np.ndarray], dtype: DTypeLike) -> Cores:
    """The inverse of `_unstored`; where `parts` have lower ranks than the spec, the rest is zeros."""
    dtype_among(CORE_DTYPES, dtype, "dtype")
    arrays = []
    for part, (left, _, right), shape in zip(parts, spec.slice_shapes, spec.core_shapes, strict=True):
        whole = np.pad(part, ((0, left - part.shape[0]), (0, 0), (0, 0), (0, right - part.shape[3])))
        arrays.append(jnp.asarray(whole.transpose(1, 0, 2, 3).reshape(shape), dtype))
    return tuple(arrays)
