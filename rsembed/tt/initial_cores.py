"""Random cores whose table has the distribution that was asked for."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from rsembed.checks import dtype_among, validated
from rsembed.tt.checks import CORE_DTYPES
from rsembed.tt.spec import TTSpec

WEIGHT_DISTRIBUTIONS = ("normal", "uniform", "approx-normal", "approx-uniform", "naive-uniform")


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
    key: PRNGKeyArray, spec: TTSpec, weight_dist: str = "normal", *, dtype: Any = jnp.float32
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
    elif weight_dist == "approx-uniform":
        cores = _triangle_wave_cores(key, spec)
    else:
        raise ValueError(f"unknown weight_dist {weight_dist!r}; choose one of {', '.join(WEIGHT_DISTRIBUTIONS)}.")
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
