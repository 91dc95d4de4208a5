"""Helpers of jax-tpu-embedding: number of cores, estimates of limits, sharding of one table."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from rsembed.checks import PositiveInt, validated
from rsembed.sparsecore.layout import (
    NUM_SC_PER_DEVICE_MAP as NUM_SC_PER_DEVICE_MAP,
    num_sparsecores_per_device as num_sparsecores_per_device,
    sharding_strategy_to_enum,
)
from rsembed.stacking import SUBLANES, round_up


@validated
def estimate_preprocessing_parameters(
    *,
    global_batch_size: PositiveInt,
    global_device_count: PositiveInt,
    num_sc_per_device: PositiveInt,
    valency: Annotated[float, "[0, inf)"],
    hot_shard_fraction: Annotated[float, "[0, 1]"] = 0.2,
    headroom_factor: Annotated[float, "(0, inf)"] = 1.25,
) -> dict[str, int]:
    """First estimate of the limits and buffer size of a table, for use before there are statistics.

    The estimate assumes that a fraction `hot_shard_fraction` of the ids of a core is on one shard,
    and that the other ids are spread evenly over all shards. The estimated number of ids in the
    largest partition is the expected number of ids plus two standard deviations. The estimate
    assumes that half of the ids in a partition are distinct.

    Args:
      global_batch_size: number of samples of all features of the stack together.
      global_device_count: number of devices.
      num_sc_per_device: cores per device.
      valency: average number of ids per sample.
      hot_shard_fraction: fraction of the ids that is on the busiest shard, 0.2 by default. Try a
        larger `hot_shard_fraction` if a few ids make up most of the data.
      headroom_factor: factor that multiplies the estimated ids per partition, 1.25 by default.

    Returns:
      Keyword arguments for `TableSpec`: the limits and the buffer size.

    Source: `estimate_preprocessing_parameters` of jax-tpu-embedding 0.2.
    """
    num_shards = global_device_count * num_sc_per_device
    ids_per_device = global_batch_size / global_device_count * valency
    ids_per_core = ids_per_device / num_sc_per_device
    mean = ids_per_core / num_shards
    spread = (
        hot_shard_fraction * ids_per_core + (1 - hot_shard_fraction) * mean + 2 * math.sqrt(mean)
    )
    peak = headroom_factor * spread
    max_ids = round_up(math.ceil(peak), SUBLANES)
    buffer_size = max(num_sc_per_device * max_ids, 1.2 * ids_per_device + 14 * num_shards)
    return {
        "max_ids_per_partition": max_ids,
        "max_unique_ids_per_partition": round_up(math.ceil(peak / 2), SUBLANES),
        "suggested_coo_buffer_size_per_device": round_up(
            math.ceil(buffer_size), SUBLANES * num_sc_per_device
        ),
    }


def embedding_table_format(mesh: Mesh, partition_spec: PartitionSpec) -> Sharding:
    """Sharding of tables on a mesh.

    In jax-tpu-embedding, `embedding_table_format` also sets the memory layout of a SparseCore.
    """
    return embedding_table_format_with_sharding(NamedSharding(mesh, partition_spec))


def embedding_table_format_with_sharding(sharding: Sharding) -> Sharding:
    """Returns `sharding` unchanged, because tables need no special memory layout."""
    return sharding


@validated
def shard_emb_table(
    table: Float[Array | np.ndarray, "vocab dim"],
    num_devices: PositiveInt,
    num_sc_per_device: PositiveInt,
    sharding_strategy: str = "MOD",
) -> Float[Array | np.ndarray, "devices rows dim"]:
    """A table split over devices: row `v*S + c*C + s` becomes row `s*(vocab/S) + v` of device `c`.

    `S` is the number of shards, and `C` the number of cores per device. `c` is the index of a
    device, `s` the index of a core on this device, and `v` the index of a row in a shard.

    Args:
      table: logical table. The number of rows must be a multiple of the number of shards.
      num_devices: number of devices that share the table.
      num_sc_per_device: cores per device.
      sharding_strategy: "MOD".

    Raises:
      ValueError: the number of rows is not a multiple of the number of shards.
    """
    sharding_strategy_to_enum(sharding_strategy)
    num_shards = num_devices * num_sc_per_device
    if table.shape[0] % num_shards:
        raise ValueError(
            f"a table of {table.shape[0]} rows cannot be dealt to {num_shards} shards evenly; pad "
            f"it to {round_up(table.shape[0], num_shards)} rows."
        )
    shards = table.reshape(-1, num_shards, table.shape[1]).swapaxes(0, 1)
    return shards.reshape(num_devices, -1, table.shape[1])


@validated
def unshard_emb_table(
    sharded_table: Float[Array | np.ndarray, "devices rows dim"],
    num_sc_per_device: PositiveInt,
    sharding_strategy: str = "MOD",
) -> Float[Array | np.ndarray, "vocab dim"]:
    """The logical table, joined from its shards. The inverse of `shard_emb_table`.

    Raises:
      ValueError: the number of rows per device is not a multiple of the number of cores.
    """
    sharding_strategy_to_enum(sharding_strategy)
    num_devices, rows, dim = sharded_table.shape
    if rows % num_sc_per_device:
        raise ValueError(
            f"a table of shape {sharded_table.shape} was not cut for {num_devices} devices with "
            f"{num_sc_per_device} cores each; pass the number that shard_emb_table was given."
        )
    shards = sharded_table.reshape(num_devices * num_sc_per_device, -1, dim)
    return shards.swapaxes(0, 1).reshape(-1, dim)
