"""The products that turn core slices into rows, tile by tile, forward and backward.

A lookup multiplies one slice per core. Gathering a slice of the largest core for every lookup is what makes the
textbook form slow: it moves far more bytes than the products are worth. The grouped form sorts lookups by their digit
of that core and pads every group to whole blocks, so a large slice is gathered once per block of `BLOCK` lookups; the
chunked form gathers every slice per lookup, which is best for two cores. Both run over tiles of at most about
`TILE_BYTES` in one loop whose trip count follows the number of lookups that contribute, and recompute the tile in the
backward pass, so temporary memory does not grow with the batch. On CPUs the native form does the same in C++, and makes
each distinct row of the batch once; the unique form does that in JAX. All sums run in a fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.kernels.contract import NO_ROW
from rsembed.parallel import distinct
from rsembed.tt import native

BLOCK = 8
"""Lookups that share one slice of the grouped core."""
TILE_BYTES = 2**21
"""Bound of the slices and products of one tile, and a little more than half of what the backward pass takes."""
MIN_GROUPED_LOOKUPS = 2_000
"""Below this many lookups, sorting them does not pay."""
IMPLEMENTATIONS = ("native", "grouped", "chunked", "unique", "plain")

Cores = tuple[Array, ...]
AnyCores = Sequence[Array | np.ndarray]
"""Cores as users have them."""


def check_implementation(implementation: str | None) -> None:
    """Raises: ValueError: there is none of this name."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}; choose one of {', '.join(IMPLEMENTATIONS)}.")


class Config(NamedTuple):
    """Static arguments of a call."""

    slice_shapes: tuple[tuple[int, int, int], ...]
    num_bags: int
    implementation: str
    grouped: int | None = None
    """The core with the largest slices, or None for the chunked form."""
    tile: int = 1
    """Lookups per tile."""

    @property
    def dim(self) -> int:
        return math.prod(q for _, q, _ in self.slice_shapes)


class Plan(NamedTuple):
    """Which lookup stands in which slot; slots and blocks that hold none have numbers beyond the end."""

    sources: Int[Array, " slots"]
    block_digits: Int[Array, " blocks"]
    num_tiles: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("slice_shapes", "num_bags", "implementation"))
def pooled_rows(
    cores: Cores,
    digits: tuple[Int[Array, " nnz"], ...],
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    *,
    slice_shapes: tuple[tuple[int, int, int], ...],
    num_bags: int,
    implementation: str | None = None,
) -> Float[Array, "bags dim"]:
    """Sum of `gain * row` over the lookups of every bag, float32; differentiable in cores and gains.

    Args:
      cores: arrays `[p_t, R_{t-1} * q_t * R_t]`.
      digits: for every core the slice that each lookup takes.
      bags: bag of each lookup, in any order; a lookup whose bag lies outside `[0, num_bags)` contributes nothing.
      gains: factor of each lookup.
      slice_shapes: `(R_{t-1}, q_t, R_t)` of every core.
      num_bags: bags in the result.
      implementation: "native" (CPUs), "grouped" or "chunked"; "unique", which makes each distinct row once and pays
        where few of many lookups are distinct, but holds a row per lookup; or "plain", which holds all slices of the
        batch at once and is the one to take for forward-mode and second derivatives. None takes "native" where it can
        run, else "grouped" or "chunked" by number of cores and lookups.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: it is "native", which cannot run here.
    """
    check_implementation(implementation)
    reason = native.unavailable_because(cores) if implementation in (None, "native") else None
    if implementation == "native" and reason is not None:
        raise NotImplementedError(f"implementation 'native' cannot run here: {reason}")
    if implementation is None:
        traced = "grouped" if len(cores) > 2 and bags.shape[0] >= MIN_GROUPED_LOOKUPS else "chunked"
        implementation = traced if reason else "native"
    if implementation == "unique":
        wanted = distinct(jnp.where((bags >= 0) & (bags < num_bags), 0, 1), digits, num_devices=1)
        order, ones = jnp.arange(bags.shape[0], dtype=jnp.int32), jnp.ones(bags.shape)
        own_bags = jnp.where(wanted.first_of == NO_ROW, NO_ROW, order)
        rows = pooled_rows(cores, wanted.lanes, own_bags, ones, slice_shapes=slice_shapes, num_bags=bags.shape[0])
        rows = gains[:, None] * rows.at[wanted.entry_of].get(mode="fill", fill_value=0.0)
        return jnp.zeros((num_bags, rows.shape[1])).at[_no_negative(bags)].add(rows, mode="drop")
    zero = varying_zero(*cores, *digits, bags, gains)
    cores, gains = jax.tree.map(lambda x: x + zero.astype(x.dtype), (cores, gains))
    sizes = [math.prod(shape) for shape in slice_shapes]
    if implementation == "plain":
        config = Config(slice_shapes, num_bags, implementation)
        bags = _no_negative(bags)
        places = tuple(jnp.where(bags < num_bags, digit, NO_ROW) for digit in digits)
        rows = _chain(config, _slices(cores, places), gains)
        return jnp.zeros((num_bags, config.dim)).at[bags].add(rows, mode="drop")
    grouped = int(np.argmax(sizes)) if implementation == "grouped" else None
    tile = _lookups_per_tile(slice_shapes, grouped, bags.shape[0])
    config = Config(slice_shapes, num_bags, implementation, grouped, tile)
    return _pooled(config, cores, digits, _no_negative(bags), gains)


def varying_zero(*arrays: Array) -> Array:
    """Zero that, inside `shard_map`, varies over all mesh axes that any array varies over, as a loop's result does.

    Whatever is added to it has a gradient that `shard_map` sums over those axes. Outside, XLA removes the addition.
    """
    first = [x.reshape(-1)[:1] for x in arrays]
    return sum((jnp.sum(x != x, dtype=jnp.int32) * 0 for x in first), start=jnp.zeros((), jnp.int32))


def _no_negative(bags: Array) -> Array:
    """JAX would count negative numbers from the end."""
    return jnp.where(bags < 0, NO_ROW, bags)


def _lookups_per_tile(slice_shapes: tuple[tuple[int, int, int], ...], grouped: int | None, num_lookups: int) -> int:
    floats, columns = 1.0, 1
    for t, (left, q, right) in enumerate(slice_shapes):
        columns *= q
        floats += columns * right + left * q * right / (BLOCK if t == grouped else 1)
    num_lookups = min(num_lookups, 2048, int(TILE_BYTES / 4 / floats))
    return max(1, -(-num_lookups // BLOCK)) * BLOCK if grouped is not None else max(1, num_lookups)


def _chain(config: Config, slices: Cores, gains: Float[Array, " n"]) -> Float[Array, "n dim"]:
    """Rows times gains from the slices of every lookup; of the grouped core there is one slice per block."""
    product = gains[:, None, None]
    for shape, piece in zip(config.slice_shapes, slices, strict=True):
        left, q, right = shape
        matrices = piece.astype(jnp.float32).reshape(-1, left, q * right)
        lookups = product.reshape(matrices.shape[0], -1, left)
        # A product with one inner place is no matrix product.
        product = lookups * matrices if left == 1 else jnp.matmul(lookups, matrices, precision="highest")
        product = product.reshape(gains.shape[0], -1, right)
    return product.reshape(gains.shape[0], config.dim)


def _make_plan(config: Config, cores: Cores, digits: tuple[Array, ...], bags: Array) -> Plan:
    n, contributes = bags.shape[0], bags < config.num_bags
    if config.grouped is None:
        places = jnp.cumsum(contributes, dtype=jnp.int32) - 1
        num_slots = -(-n // config.tile) * config.tile
        sources = jnp.arange(n, dtype=jnp.int32)
        places = jnp.where(contributes, places, num_slots)
        used, block_digits = jnp.sum(contributes, dtype=jnp.int32), jnp.zeros(0, jnp.int32)
    else:
        num_digits = cores[config.grouped].shape[0]
        keys = jnp.where(contributes, digits[config.grouped], num_digits)
        sorted_keys, sources = _stable_sort(keys, num_digits)
        counts = jnp.zeros(num_digits + 1, jnp.int32).at[keys].add(1)[:num_digits]
        blocks = -(-counts // BLOCK)
        first, first_block = jnp.cumsum(counts) - counts, jnp.cumsum(blocks) - blocks
        # Sums of rounded-up counts never exceed this.
        num_blocks = n // BLOCK + min(num_digits, n)
        per_tile = config.tile // BLOCK
        num_blocks = -(-num_blocks // per_tile) * per_tile
        num_slots = num_blocks * BLOCK
        shift = (first_block * BLOCK - first).at[sorted_keys].get(mode="clip")
        places = jnp.where(sorted_keys < num_digits, jnp.arange(n, dtype=jnp.int32) + shift, num_slots)
        block_digits = jnp.full(num_blocks, NO_ROW, jnp.int32).at[places // BLOCK].set(sorted_keys, mode="drop")
        used = jnp.sum(blocks) * BLOCK
    slots = jnp.full(num_slots, NO_ROW, jnp.int32).at[places].set(sources, mode="drop", unique_indices=True)
    return Plan(slots, block_digits, -(-used // config.tile))


def _stable_sort(keys: Array, most: int) -> tuple[Array, Array]:
    """Ascending keys and where each stood."""
    n = keys.shape[0]
    places, bits = jnp.arange(n, dtype=jnp.int32), (n - 1).bit_length()
    if (most + 1) << bits < 2**31:  # one array sorts seven times faster than two
        packed = jnp.sort((keys << bits) + places)
        return packed >> bits, packed & ((1 << bits) - 1)
    keys, places = jax.lax.sort((keys, places), num_keys=1, is_stable=True)
    return keys, places


def _tile(
    config: Config, plan: Plan, digits: tuple[Array, ...], bags: Array, gains: Array, j: Array
) -> tuple[Array, tuple[Array, ...], Array, Array]:
    """Sources, slices to take from every core, bags and gains of tile `j`."""

    def part(x: Array, size: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, j * size, size)

    sources = part(plan.sources, config.tile)
    places = [digit.at[sources].get(mode="fill", fill_value=NO_ROW) for digit in digits]
    if config.grouped is not None:
        places[config.grouped] = part(plan.block_digits, config.tile // BLOCK)
    tile_bags = bags.at[sources].get(mode="fill", fill_value=NO_ROW)
    return sources, tuple(places), tile_bags, gains.at[sources].get(mode="fill", fill_value=0.0)


def _slices(cores: Cores, places: tuple[Array, ...]) -> Cores:
    """Float32 slices; zeros where there is no lookup, so that nothing unasked for, NaN included, reaches a sum."""
    taken = (core.at[place].get(mode="fill", fill_value=0) for core, place in zip(cores, places, strict=True))
    return tuple(piece.astype(jnp.float32) for piece in taken)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pooled(config: Config, cores: Cores, digits: tuple[Array, ...], bags: Array, gains: Array) -> Array:
    return _forward(config, cores, digits, bags, gains)[0]


def _forward(config: Config, cores: Cores, digits: tuple[Array, ...], bags: Array, gains: Array) -> tuple[Array, Any]:
    zeros = jnp.full((config.num_bags, config.dim), varying_zero(gains).astype(jnp.float32))
    if bags.shape[0] == 0:
        return zeros, (cores, digits, bags, gains, None)
    if config.implementation == "native":
        operands, shapes = (cores, digits, bags, gains), config.slice_shapes
        pooled = native.pooled(*operands, slice_shapes=shapes, num_bags=config.num_bags)
        return pooled + varying_zero(gains).astype(jnp.float32), (cores, digits, bags, gains, None)
    plan = _make_plan(config, cores, digits, bags)

    def add_tile(j: Array, pooled: Array) -> Array:
        _, places, tile_bags, tile_gains = _tile(config, plan, digits, bags, gains, j)
        return pooled.at[tile_bags].add(_chain(config, _slices(cores, places), tile_gains), mode="drop")

    return jax.lax.fori_loop(0, plan.num_tiles, add_tile, zeros), (cores, digits, bags, gains, plan)


def _backward(config: Config, saved: Any, d_pooled: Array) -> tuple[Any, ...]:
    cores, digits, bags, gains, plan = saved
    no_cotangent = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (digits, bags))
    if bags.shape[0] == 0:
        return jax.tree.map(jnp.zeros_like, cores), *no_cotangent, jnp.zeros_like(gains)
    if config.implementation == "native":
        d_cores, d_gains = native.pull(cores, digits, bags, gains, d_pooled, slice_shapes=config.slice_shapes)
        zero = varying_zero(gains).astype(jnp.float32)
        d_cores = tuple((d + zero).astype(core.dtype) for d, core in zip(d_cores, cores, strict=True))
        return d_cores, *no_cotangent, d_gains + zero
    zero = varying_zero(gains).astype(jnp.float32)

    def add_tile(j: Array, sums: tuple[Cores, Array]) -> tuple[Cores, Array]:
        d_cores, d_gains = sums
        sources, places, tile_bags, tile_gains = _tile(config, plan, digits, bags, gains, j)
        d_rows = d_pooled.at[tile_bags].get(mode="fill", fill_value=0.0)
        pull = jax.vjp(functools.partial(_chain, config), _slices(cores, places), tile_gains)[1]
        d_slices, d_tile_gains = pull(d_rows)
        d_cores = tuple(
            d_core.at[place].add(d_slice, mode="drop")
            for d_core, place, d_slice in zip(d_cores, places, d_slices, strict=True)
        )
        return d_cores, d_gains.at[sources].set(d_tile_gains, mode="drop")

    start = tuple(jnp.full(core.shape, zero) for core in cores), jnp.full(gains.shape, zero)
    d_cores, d_gains = jax.lax.fori_loop(0, plan.num_tiles, add_tile, start)
    d_cores = tuple(d_core.astype(core.dtype) for d_core, core in zip(d_cores, cores, strict=True))
    return d_cores, *no_cotangent, d_gains


_pooled.defvjp(_forward, _backward)
