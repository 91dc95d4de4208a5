"""Makes cores at random, from a dense table, from cores of higher rank, or from a tensorly matrix.

Tables are decomposed on the host in NumPy. Only `to_tensorly` imports tensorly. `to_tensorly`
selects the NumPy backend of tensorly, because tensorly's JAX backend would switch the whole process
to 64 bits.
"""

from __future__ import annotations

import dataclasses
import functools
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

WeightDistribution = Literal[
    "normal", "uniform", "approx-normal", "approx-uniform", "naive-uniform"
]
RelativeError = Annotated[float, "[0, inf)"]


@validated
def init_cores(
    key: PRNGKeyArray,
    spec: TTSpec,
    weight_dist: WeightDistribution = "normal",
    *,
    dtype: Any = jnp.float32,
) -> Cores:
    """Random cores of a new table.

    With all distributions except "naive-uniform", the entries of the table have the standard
    deviation of the uniform distribution on `[-b, b]` with `b = 1/sqrt(num_embeddings)`.

    Args:
      key: random key. Equal keys give equal cores.
      spec: size, factors and ranks of the table.
      weight_dist: name of the distribution.

        * "normal" (default): independent, normally distributed entries of the cores.
        * "uniform": independent, uniformly distributed entries of the cores, with mean zero.
        * "approx-normal": normally distributed entries of the table. With "approx-normal", the
          distribution of an entry is exactly normal for two or three cores, and approximately
          normal for four or more cores.
        * "approx-uniform": uncorrelated, nearly uniform entries of the table. "approx-uniform"
          needs ranks of at least 2, and large ranks give a more uniform distribution than small
          ranks.
        * "naive-uniform": uniformly distributed entries of the cores in
          `[0, 1/sqrt(num_embeddings)]`, as in FBTT. `init_cores` warns about "naive-uniform",
          because all entries of the table are nearly zero.

      dtype: dtype of the cores, float32 (default) or bfloat16.

    Raises: ValueError: the distribution is unknown, or the ranks are too small for the
      distribution.

    Source: Yin et al. (2021), "TT-Rec", section on initialisation.
    """
    dtype_among(CORE_DTYPES, dtype, "init_cores: dtype")
    if weight_dist == "naive-uniform":
        warnings.warn(
            "weight_dist='naive-uniform' makes a table of nearly equal, nearly zero rows that "
            "trains slowly; 'uniform' has the standard deviation of the published target.",
            stacklevel=2,
        )
    if weight_dist == "approx-uniform" and min(spec.tt_ranks) < 2:
        raise ValueError(
            f"weight_dist='approx-uniform' needs ranks of at least 2, got {list(spec.tt_ranks)}; "
            "'approx-normal' works with any."
        )
    return _random_cores(key, spec, weight_dist, jnp.dtype(dtype))


# Compiled as one program, so that the values are those of `init_cores` inside `jit`.
@functools.partial(jax.jit, static_argnames=("spec", "weight_dist", "dtype"))
def _random_cores(
    key: PRNGKeyArray,
    spec: TTSpec,
    weight_dist: WeightDistribution,
    dtype: np.dtype,
) -> Cores:
    # Each entry of the table is a sum of `prod(tt_ranks)` products, and each of these products
    # multiplies one number from every core.
    table_std = 1 / math.sqrt(3 * spec.num_embeddings)
    product_variance = table_std**2 / math.prod(spec.tt_ranks)
    std = product_variance ** (1 / (2 * spec.num_cores))
    shape = (spec.num_params,)
    if weight_dist in ("normal", "approx-normal"):
        numbers = std * jax.random.normal(key, shape)
        cores = _split(spec, numbers)
        if weight_dist == "approx-normal":
            # Let the entries of a matrix be independent and normally distributed. The product of
            # the matrix with a vector of fixed length on each side is normally distributed.
            cores[0] = _with_rms(cores[0], std, axis=3)
            if spec.num_cores > 2:
                cores[-1] = _with_rms(cores[-1], std, axis=1)
    elif weight_dist == "uniform":
        bound = std * math.sqrt(3)
        numbers = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        cores = _split(spec, numbers)
    elif weight_dist == "naive-uniform":
        bound = 1 / math.sqrt(spec.num_embeddings)
        numbers = jax.random.uniform(key, shape, maxval=bound)
        cores = _split(spec, numbers)
    else:
        cores = _triangle_wave_cores(key, spec)
    shaped = []
    for core, core_shape in zip(cores, spec.core_shapes, strict=True):
        shaped.append(core.reshape(core_shape).astype(dtype))
    return tuple(shaped)


def _split(
    spec: TTSpec,
    numbers: Array,
) -> list[Array]:
    """Cores `[p_t, R_{t-1}, q_t, R_t]` cut out of one flat array of `spec.num_params` numbers."""
    sizes = [math.prod(shape) for shape in spec.core_shapes]
    cores = []
    for part, shape in zip(_parts(numbers, sizes), spec.slice_shapes, strict=True):
        cores.append(part.reshape(-1, *shape))
    return cores


def _parts(
    numbers: Array,
    sizes: Sequence[int],
) -> list[Array]:
    """Splits a flat array into consecutive parts of the sizes `sizes`."""
    ends = list(itertools.accumulate(sizes))
    return jnp.split(numbers, ends[:-1])


def _with_rms(
    x: Array,
    rms: float,
    axis: int,
) -> Array:
    """Rescales the vectors along `axis` to the root mean square `rms`."""
    mean_square = jnp.mean(x * x, axis=axis, keepdims=True)
    scale = rms * jax.lax.rsqrt(mean_square)
    return x * scale


def _triangle_wave_cores(
    key: PRNGKeyArray,
    spec: TTSpec,
) -> list[Array]:
    """Cores `[p, R_left, q, R_right]` of a table with uniform, uncorrelated entries.

    Each entry of the table is the triangle wave of a sum of random angles, one angle from every
    core. The triangle wave of a uniformly distributed angle is uniformly distributed. The sums of
    two entries of the table differ in at least one random angle, so the entries are uncorrelated.
    The Fourier series of the triangle wave is a tensor train, because core `t` can rotate the pair
    `(cos, sin)` of harmonic `h` by `h` times the angle from core `t`. A harmonic needs two ranks,
    so the series is cut off after `min(tt_ranks) // 2` harmonics. Entries for ranks that no
    harmonic uses would stay zero in training, so noise is added to every core. The root mean square
    of the noise is 1 % of the root mean square of the core.
    """
    d = spec.num_cores
    num_harmonics = min(spec.tt_ranks) // 2
    harmonics = 2 * jnp.arange(num_harmonics, dtype=jnp.float32) + 1
    harmonics = harmonics[None, None, None, :]
    coefficients = 8 / (jnp.pi * harmonics) ** 2 / math.sqrt(spec.num_embeddings)
    amplitudes = coefficients ** (1 / d)
    angle_key, noise_key = jax.random.split(key)
    noise = 0.01 * jax.random.normal(noise_key, (spec.num_params,))
    core_noises = _split(spec, noise)
    num_angles = []
    for p, q in zip(spec.tt_p_shapes, spec.tt_q_shapes, strict=True):
        num_angles.append(p * q)
    all_angles = jax.random.uniform(angle_key, (sum(num_angles),), maxval=2 * jnp.pi)
    core_angles = _parts(all_angles, num_angles)
    cores = []
    for t in range(d):
        p = spec.tt_p_shapes[t]
        rank, q, next_rank = spec.slice_shapes[t]
        angles = core_angles[t].reshape(p, 1, q, 1) * harmonics
        cos = amplitudes * jnp.cos(angles)
        sin = amplitudes * jnp.sin(angles)
        from_cos = jnp.stack([cos, sin], -1)
        from_sin = jnp.stack([-sin, cos], -1)
        # `rotation` has one 2 x 2 rotation matrix per harmonic. The axes of `rotation` are [p, row
        # of the matrix, q, harmonic, column of the matrix].
        rotation = jnp.stack([from_cos, from_sin], 1)
        rotation = rotation.reshape(p, 2, q, num_harmonics, 2)
        if t == 0:
            first_row = rotation[:, :1]
            core = first_row.reshape(p, 1, q, -1)
        elif t == d - 1:
            first_column = rotation[..., 0].transpose(0, 3, 1, 2)
            core = first_column.reshape(p, -1, q, 1)
        else:
            diagonal = jnp.eye(num_harmonics)[None, :, None, None, :, None]
            block_diagonal = rotation[:, None] * diagonal
            core = block_diagonal.reshape(p, 2 * num_harmonics, q, 2 * num_harmonics)
        core = jnp.pad(core, _rank_padding(core.shape, rank, next_rank))
        rms = jnp.sqrt(jnp.mean(core * core))
        cores.append(core + rms * core_noises[t])
    return cores


def _rank_padding(
    shape: Sequence[int],
    rank: int,
    next_rank: int,
) -> list[tuple[int, int]]:
    """Widths for `np.pad` that pad a core of shape `shape` to the ranks `rank` and `next_rank`."""
    return [
        (0, 0),
        (0, rank - shape[1]),
        (0, 0),
        (0, next_rank - shape[3]),
    ]


@validated
def from_dense(
    spec: TTSpec,
    table: Float[Array | np.ndarray, "vocab dim"],
    *,
    dtype: Any = jnp.float32,
) -> Cores:
    """Cores that approximate a dense table, by TT-SVD.

    A trained table is seldom close to a small tensor train, so the cores are less accurate than the
    table. To recover some of the accuracy, pass the cores to `set_cores` of a `TTEmbeddingBag` and
    continue training.

    Args:
      spec: factors and ranks, for example from `TTSpec.suggest` or `TTSpec.for_budget`. If a rank
        of the spec exceeds the number of singular values, the cores are padded with zeros. With the
        ranks `TTSpec.max_ranks`, the cores are exact, and `round_cores` can lower the ranks to a
        chosen error.
      table: float table `[num_embeddings, embedding_dim]`.
      dtype: dtype of the cores, float32 (default) or bfloat16.

    Raises: ValueError: the shape of the table differs from the spec, or an entry is not finite.

    Source: Oseledets (2011), "Tensor-train decomposition", algorithm 1.
    """
    dense = np.asarray(table, np.float32)
    p = spec.tt_p_shapes
    q = spec.tt_q_shapes
    d = spec.num_cores
    if dense.shape != (spec.num_embeddings, spec.embedding_dim):
        raise ValueError(
            f"the table of shape {dense.shape} must hold {spec.num_embeddings} x "
            f"{spec.embedding_dim} numbers; choose another spec."
        )
    check_finite(dense, "from_dense: the table", way_out="clean it before")
    num_padded_rows = math.prod(p)
    padded = np.zeros((num_padded_rows, spec.embedding_dim), np.float32)
    padded[: spec.num_embeddings] = dense
    # `digits` has one axis per digit: row digit 1, column digit 1, row digit 2, column digit 2, ...
    axes: list[int] = []
    for t in range(d):
        axes += [t, d + t]
    digits = padded.reshape(*p, *q).transpose(axes)
    remainder = digits.reshape(1, -1)
    cores = []
    for t in progress(range(d - 1), description="TT-SVD", delay=1.0, leave=False):
        rank = remainder.shape[0]
        matrix = remainder.reshape(rank * p[t] * q[t], -1)
        basis, remainder = _truncated(matrix, spec.tt_ranks[t], 0.0)
        core = basis.reshape(rank, p[t], q[t], -1)
        cores.append(core)
    last_core = remainder.reshape(-1, p[-1], q[-1], 1)
    cores.append(last_core)
    return _from_tensorly_layout(spec, cores, dtype)


@validated
def round_cores(
    spec: TTSpec,
    cores: AnyCores,
    *,
    ranks: Integers | None = None,
    max_relative_error: RelativeError = 0.0,
) -> tuple[TTSpec, Cores]:
    """Lowers the ranks of a tensor train, without building the dense table.

    The relative error is measured on the padded table, which has `prod(tt_p_shapes)` rows.

    Args:
      spec: size, factors and ranks of the table.
      cores: cores of the table.
      ranks: upper bounds on the inner ranks, one bound per boundary between cores. Default:
        `spec.tt_ranks`.
      max_relative_error: largest allowed error, relative to the norm of the padded table. With 0,
        the default, the only bounds on the ranks are `ranks` and `TTSpec.max_ranks`. The upper
        bounds in `ranks` take precedence, so the error can exceed `max_relative_error`.

    Returns: spec with the lower ranks, and the cores.

    Raises: ValueError: `max_relative_error` is negative or not finite, or the number of `ranks` is
      wrong.

    Source: Oseledets (2011), "Tensor-train decomposition", algorithm 2.
    """
    arrays = check_cores(spec, cores)
    max_ranks = spec.tt_ranks
    if ranks is not None:
        bounds = dataclasses.replace(spec, tt_ranks=tuple(ranks))
        max_ranks = bounds.tt_ranks
    parts = []
    for core in _in_tensorly_layout(spec, arrays):
        parts.append(core.astype(np.float64))
    # Make the rows of every core after the first core orthonormal, so that a change of the first
    # core has the same norm as the resulting change of the table.
    for t in range(spec.num_cores - 1, 0, -1):
        rank, p, q, next_rank = parts[t].shape
        matrix = parts[t].reshape(rank, -1)
        basis, factor = np.linalg.qr(matrix.T)
        parts[t] = basis.T.reshape(-1, p, q, next_rank)
        parts[t - 1] = parts[t - 1] @ factor.T
    num_boundaries = spec.num_cores - 1
    table_norm = float(np.linalg.norm(parts[0]))
    max_error = max_relative_error * table_norm / math.sqrt(num_boundaries)
    for t in progress(range(num_boundaries), description="rounding", delay=1.0, leave=False):
        rank, p, q, next_rank = parts[t].shape
        matrix = parts[t].reshape(-1, next_rank)
        basis, rest = _truncated(matrix, max_ranks[t], max_error)
        parts[t] = basis.reshape(rank, p, q, -1)
        parts[t + 1] = np.tensordot(rest, parts[t + 1], 1)
    new_ranks = [part.shape[3] for part in parts[:-1]]
    rounded = dataclasses.replace(spec, tt_ranks=tuple(new_ranks))
    dtype = arrays[0].dtype
    return rounded, _from_tensorly_layout(rounded, parts, dtype)


def to_tensorly(spec: TTSpec, cores: AnyCores) -> Any:
    """The table as a `tensorly.tt_matrix.TTMatrix` of NumPy cores `[R_{t-1}, p_t, q_t, R_t]`."""
    import tensorly
    from tensorly.tt_matrix import TTMatrix

    arrays = check_cores(spec, cores)
    with tensorly.backend_context("numpy"):
        return TTMatrix(_in_tensorly_layout(spec, arrays))


def from_tensorly(
    tt_matrix: object,
    num_embeddings: int | None = None,
    *,
    dtype: Any = jnp.float32,
) -> tuple[TTSpec, Cores]:
    """Spec and cores of a `TTMatrix`, or of any sequence of arrays `[R_{t-1}, p_t, q_t, R_t]`.

    Args:
      tt_matrix: the `TTMatrix`, or the sequence of arrays.
      num_embeddings: number of rows of the table. Default: the product of the row factors `p_t`.
      dtype: dtype of the returned cores, float32 (default) or bfloat16.

    Raises: ValueError: an array does not have four axes, or `dtype` is unsupported.
    """
    cores = tt_matrix if np.iterable(tt_matrix) else [tt_matrix]
    parts = [np.asarray(core) for core in cores]
    shapes = [part.shape for part in parts]
    if not shapes or any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"from_tensorly: cores must be arrays [R, p, q, R], got shapes {shapes}.")
    _, p, q, ranks = zip(*shapes, strict=True)
    if num_embeddings is None:
        num_embeddings = math.prod(p)
    spec = TTSpec(num_embeddings, p, q, ranks[:-1])
    return spec, _from_tensorly_layout(spec, parts, dtype)


def _truncated(
    matrix: np.ndarray,
    rank: int,
    max_error: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Two factors of a matrix, from a truncated SVD.

    The product of the factors is close to the matrix.

    Args:
      matrix: the matrix to factor.
      rank: upper bound on the number of columns of the first factor.
      max_error: upper bound on the error of the product, in the Frobenius norm. The first factor
        has the fewest columns that keep the error within `max_error`, but at most `rank` columns,
        even if `rank` columns make the error larger than `max_error`.
    """
    wide_matrix = matrix.astype(np.float64)
    basis, values, rest = np.linalg.svd(wide_matrix, full_matrices=False)
    # `errors[n]` is the error of a product without the `n + 1` smallest singular values.
    errors = np.sqrt(np.cumsum(values[::-1] ** 2))
    num_small = int(np.searchsorted(errors, max_error))
    num_kept = max(1, min(rank, values.size - num_small))
    kept_basis = basis[:, :num_kept]
    scaled_rest = values[:num_kept, None] * rest[:num_kept]
    return kept_basis.astype(matrix.dtype), scaled_rest.astype(matrix.dtype)


def _in_tensorly_layout(
    spec: TTSpec,
    cores: Cores,
) -> list[np.ndarray]:
    """NumPy cores `[R_{t-1}, p_t, q_t, R_t]`, the layout of tensorly."""
    parts = []
    for core, shape in zip(cores, spec.slice_shapes, strict=True):
        slices = np.asarray(core, np.float32).reshape(-1, *shape)
        parts.append(slices.transpose(1, 0, 2, 3))
    return parts


def _from_tensorly_layout(
    spec: TTSpec,
    parts: Sequence[np.ndarray],
    dtype: DTypeLike,
) -> Cores:
    """Cores from arrays in tensorly's layout.

    An array with lower ranks than `spec` is padded with zeros.
    """
    dtype_among(CORE_DTYPES, dtype, "dtype")
    cores = []
    for t, part in enumerate(parts):
        rank, _, next_rank = spec.slice_shapes[t]
        slices = part.transpose(1, 0, 2, 3)
        padded = np.pad(slices, _rank_padding(slices.shape, rank, next_rank))
        core = padded.reshape(spec.core_shapes[t])
        cores.append(jnp.asarray(core, dtype))
    return tuple(cores)
