"""The layers of the Sparse Operation Kit: lookups in sharded tables with and without pooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rsembed.bags import Bags
from rsembed.checks import PositiveInt, describe, validated
from rsembed.collection import inputs
from rsembed.keys import Keys, check_not_cut, split_keys
from rsembed.sok import lookups
from rsembed.sok.lookups import KeysOfBags, StepOnce, WeightsOfKeys
from rsembed.sok.variables import EmbeddingVariable, embedding_variable
from rsembed.specs import Combiner

Batch = tuple[KeysOfBags, WeightsOfKeys]
"""Arguments of a layer: keys and weights."""


class _Layer(nnx.Module):
    """Base of both layers: a sharded table that the `slot_num` features of a sample share."""

    def __init__(
        self,
        name: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        use_hashtable: bool,
        combiner: Combiner,
        *,
        embedding_initializer: str | float | Callable[..., Array] = "uniform",
        **options: Any,
    ):
        self.name = name
        self.combiner = combiner
        self.slot_num = slot_num
        self.max_nnz = max_nnz
        self.variable: EmbeddingVariable = embedding_variable(
            name,
            embedding_vec_size,
            rows_per_device=max_vocabulary_size_per_gpu,
            use_hashtable=use_hashtable,
            initializer=embedding_initializer,
            **options,
        )

    @property
    def embedding_variable(self) -> EmbeddingVariable:
        """The layer's table, under the attribute name of the Sparse Operation Kit."""
        return self.variable

    def _look_up(
        self,
        read: Callable[[Batch], dict[str, Bags]],
        batch: Batch,
        training: bool,
        *axes: int,
    ) -> tuple[Array, StepOnce]:
        """Rows of a batch in the shape `[*axes, dim]`, and a function that trains the table."""
        table = self.variable.table
        bags = inputs.prepare(
            table.collection.features,
            batch,
            table.context.devices,
            bounds_check="raise",
            what=f"layer {self.name!r}",
            read=read,
        )
        (output,), backward = lookups.look_up_variables(
            [self.variable],
            [bags[self.name]],
            [self.combiner],
            training=training,
        )
        output = output.reshape(*axes, output.shape[-1])
        backward.shapes = [output.shape]
        return output, backward

    def _read(self, batch: Batch) -> dict[str, Bags]:
        """Checks the number and the sizes of the bags of a batch, and returns `{layer name: bags}`.

        Raises: ValueError: the number of bags is not a multiple of `slot_num`, or a bag has a wrong
          number of keys.
        """
        what = f"layer {self.name!r}"
        bags = lookups.key_bags(*batch, self.name)
        if bags.num_bags % self.slot_num:
            raise ValueError(
                f"{what}: {bags.num_bags} bags do not make samples of slot_num={self.slot_num} "
                "each; pass [batch, slot_num, keys] or [batch * slot_num, keys]."
            )
        if bags.dense_shape is not None:  # Shapes of arrays are known even inside `jit`.
            lengths = np.full(bags.num_bags, math.prod(bags.dense_shape[1:]))
        elif inputs.is_unknown(bags):
            return {self.name: bags}  # Offsets, and so the sizes of bags, are unknown inside `jit`.
        else:
            lengths = np.diff(np.asarray(bags.offsets))
        if self.combiner == "none":
            is_wrong = lengths != self.max_nnz
            agreed = f"exactly {self.max_nnz} per slot were agreed (nnz_per_slot)"
        else:
            is_wrong = lengths > self.max_nnz
            agreed = f"at most {self.max_nnz} per bag were agreed (max_nnz)"
        if is_wrong.any():
            bag = int(is_wrong.argmax())
            problem = f"bag {bag} has {lengths[bag]} keys, but {agreed}"
            raise ValueError(f"{what}: {problem}; change one of them.")
        if not inputs.is_unknown(bags):
            context = self.variable.table.context
            context.check_batch(bags.num_bags // self.slot_num, what)
        return {self.name: bags}


class DistributedEmbedding(_Layer):
    """Layer that looks up and pools rows for `slot_num` features, which share a sharded table.

    `layer(keys)` looks up rows, trains nothing, and returns zeros for a key without a row. To
    train, look up rows with `out, backward = layer.vjp(keys)`. `layer.vjp` returns the initial row
    for a new key. `backward(d_out)` stores the rows of new keys, and updates every row that the
    lookup read. `backward` can be called once per lookup. Lookups and `backward` work eagerly and
    under `nnx.jit`. `nnx.jit` copies the table unless the layer is donated (`donate_argnums`).
    Outputs do not depend on the number of devices.

    Args:
      combiner: "sum", "mean" or "sqrtn" over the keys of a feature, in upper or lower case.
      max_vocabulary_size_per_gpu: number of rows on each device.
      embedding_vec_size: number of columns of the table.
      slot_num: number of features per sample. All features read the same row for the same key. To
        give each feature its own rows, make the index of the feature a part of the key.
      max_nnz: maximum number of keys of one feature in one sample.
      max_feature_num: ignored, but accepted because the Sparse Operation Kit has this argument: the
        maximum number of keys per sample.
      use_hashtable: if True, the default, keys are any integers, and a key gets a row in its first
        training step. If False, keys are row numbers below `max_vocabulary_size_per_gpu * devices`.
      name: name of the table in error messages and dumps. The initial rows depend on the name.
      **options: `key_dtype`, `embedding_initializer`, `optimizer`, `context`, `rngs` and policies,
        see `embedding_variable`.

    Raises: ValueError: an argument is out of range or unknown.

    Source: Sparse Operation Kit, `sok.DistributedEmbedding`.

    Example:
      >>> import numpy as np
      >>> from rsembed import sok
      >>> context = sok.Init(global_batch_size=8)
      >>> layer = sok.DistributedEmbedding("Mean", 100, 4, slot_num=2, max_nnz=3)
      >>> keys = np.full((8, 2, 3), -1)
      >>> keys[0, 0] = [2**40, 7, -1]
      >>> out, backward = layer.vjp(keys)
      >>> backward(np.ones_like(out))
      >>> out.shape, layer.variable.num_rows
      ((8, 2, 4), 2)
    """

    @validated
    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: PositiveInt,
        embedding_vec_size: PositiveInt,
        slot_num: PositiveInt,
        max_nnz: PositiveInt,
        max_feature_num: PositiveInt | None = None,
        use_hashtable: bool = True,
        name: str = "distributed_embedding",
        **options: Any,
    ):
        del max_feature_num
        super().__init__(
            name,
            max_vocabulary_size_per_gpu,
            embedding_vec_size,
            slot_num,
            max_nnz,
            use_hashtable,
            lookups.checked_combiner(combiner, f"layer {name!r}: combiner"),
            **options,
        )

    def __call__(
        self,
        keys: KeysOfBags,
        weights: WeightsOfKeys = None,
        *,
        training: bool = False,
    ) -> Float[Array, "batch slot_num dim"]:
        """Pooled rows, sharded over the devices by sample.

        Args:
          keys: integers or `Keys` of shape `[batch, slot_num, keys]` or `[batch * slot_num, keys]`,
            with padding -1 for signed dtypes. Instead of an array, you can pass `Bags`, or lists
            with one bag per sample and feature. With several processes, each process passes its
            part of the batch.
          weights: one weight per key, 1 by default.
          training: if True, the lookup returns the initial rows for new keys. If False, the lookup
            returns zeros for new keys.

        Raises:
          TypeError, ValueError: keys or weights are invalid. The error message contains the name of
            the layer.
          RuntimeError: the table is full, see `when_full` of `rsembed.Hashed`.
        """
        output, _ = self._look_up(self._read, (keys, weights), training, -1, self.slot_num)
        return output

    def vjp(
        self,
        keys: KeysOfBags,
        weights: WeightsOfKeys = None,
    ) -> tuple[Float[Array, "batch slot_num dim"], StepOnce]:
        """Pooled rows for a training step, and a function `backward(d_out)` that trains the table.

        `__call__` describes the arguments.
        """
        return self._look_up(self._read, (keys, weights), True, -1, self.slot_num)


class All2AllDenseEmbedding(_Layer):
    """Layer that looks up one row per key, without pooling, in a table sharded over all devices.

    `DistributedEmbedding` describes how to train the layer. With `dynamic_input`, `keys` is a flat
    list of any length, such as the result of `unique`, and the result has the rows in the order of
    `keys`. With several processes, every process must pass the same number of keys (pad with -1).
    If the number of keys is not a multiple of the number of devices, the result of several
    processes contains rows of zeros: after the rows of each process, or for traced or global
    `keys`, after the rows of all processes.

    Args:
      max_vocabulary_size_per_gpu: number of rows on each device.
      embedding_vec_size: number of columns of the table.
      slot_num: number of features per sample. All features read the same row for the same key.
      nnz_per_slot: number of keys of each feature in each sample.
      dynamic_input: if True, `keys` has the shape `[num_keys]`. If False, the default, `keys` has
        the shape `[batch, slot_num, nnz_per_slot]`.
      use_hashtable: see `DistributedEmbedding`.
      name: name of the table in error messages and dumps. The initial rows depend on the name.
      **options: see `DistributedEmbedding`.

    Raises: ValueError: an argument is out of range or unknown.

    Source: Sparse Operation Kit, `sok.All2AllDenseEmbedding`.

    Example:
      >>> import numpy as np
      >>> from rsembed import sok
      >>> context = sok.Init()
      >>> layer = sok.All2AllDenseEmbedding(100, 4, slot_num=1, nnz_per_slot=1, dynamic_input=True)
      >>> layer(np.array([7, 2**40, 9]), training=True).shape
      (3, 4)
    """

    @validated
    def __init__(
        self,
        max_vocabulary_size_per_gpu: PositiveInt,
        embedding_vec_size: PositiveInt,
        slot_num: PositiveInt,
        nnz_per_slot: PositiveInt,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        name: str = "all2all_dense_embedding",
        **options: Any,
    ):
        super().__init__(
            name,
            max_vocabulary_size_per_gpu,
            embedding_vec_size,
            slot_num,
            nnz_per_slot,
            use_hashtable,
            "none",
            **options,
        )
        self.dynamic_input = dynamic_input

    def __call__(self, keys: KeysOfBags, *, training: bool = False) -> Float[Array, "..."]:
        """Row of each key: `[batch, slot_num, nnz_per_slot, dim]`, or `[num_keys, dim]`.

        Args:
          keys: keys of shape `[batch, slot_num, nnz_per_slot]`, or `[num_keys]` with
            `dynamic_input`. A key of -1 is padding, and its row in the result is zero.
          training: if True, the lookup returns the initial rows for new keys. If False, the lookup
            returns zeros for new keys.

        Raises: see `DistributedEmbedding`.
        """
        output, _ = self._rows(keys, training)
        return output

    def vjp(self, keys: KeysOfBags) -> tuple[Float[Array, "..."], StepOnce]:
        """Rows for a training step, and a function `backward(d_out)` that trains the table.

        `__call__` describes the arguments.
        """
        return self._rows(keys, True)

    def _rows(self, keys: KeysOfBags, training: bool) -> tuple[Array, StepOnce]:
        batch = (keys, None)
        if not self.dynamic_input:
            return self._look_up(self._read, batch, training, -1, self.slot_num, self.max_nnz)
        output, backward = self._look_up(self._read_list, batch, training, -1)
        num_keys = lookups.key_bags(keys, None, self.name).num_bags
        num_padded = output.shape[0] - num_keys
        if self.variable.table.context.devices.num_processes == 1 and num_padded > 0:
            output = output[:num_keys]
            backward.num_padded = num_padded
            backward.shapes = [output.shape]
        return output, backward

    def _read_list(self, batch: Batch) -> dict[str, Bags]:
        """Turns each key into a bag of one key, and returns the padded `{layer name: bags}`.

        Padding makes the number of bags a multiple of the number of devices.

        Raises: ValueError: the keys are not a flat list.
        """
        what = f"feature {self.name!r}"
        devices = self.variable.table.context.devices
        bags = lookups.key_bags(*batch, self.name)
        if bags.num_bags and bags.dense_shape != (bags.num_bags,):
            problem = f"dynamic_input takes a flat list of keys, got {describe(batch[0])}"
            raise ValueError(f"layer {self.name!r}: {problem}.")
        keys = bags.ids
        if not isinstance(keys, Keys):
            check_not_cut(keys, cast(str, self.variable.table.spec.storage.key_dtype), what)
            keys = split_keys(keys, feature=what)
        num_shares = devices.num_devices
        if not inputs.is_unknown(bags):
            # A traced or global array contains the keys of all processes. A NumPy array or a local
            # JAX array contains only the keys of this process, which are split over the devices of
            # this process.
            num_shares = num_shares // devices.num_processes
        xp: Any = np if isinstance(keys.low, np.ndarray) else jnp
        num_padded = -keys.low.shape[0] % num_shares
        padded = jax.tree.map(lambda lane: xp.pad(lane, (0, num_padded)), keys)
        return {self.name: lookups.key_bags(padded, None, self.name)}
