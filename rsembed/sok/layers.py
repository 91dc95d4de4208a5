"""The two layers of the Sparse Operation Kit: pooled and un-pooled lookups of tables over the devices."""

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

Given = tuple[KeysOfBags, WeightsOfKeys]


class _Layer(nnx.Module):
    """Base of both layers: a table over the devices, read by batches of `slot_num` features a sample."""

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
        self.name, self.combiner, self.slot_num, self.max_nnz = name, combiner, slot_num, max_nnz
        self.variable: EmbeddingVariable = embedding_variable(
            name,
            embedding_vec_size,
            rows_per_device=max_vocabulary_size_per_gpu,
            use_hashtable=use_hashtable,
            initializer=embedding_initializer,
            **options,
        )
        lookups.engine_of(((self.variable.table.kind, (combiner,), False),))  # made here, not in the first step

    @property
    def embedding_variable(self) -> EmbeddingVariable:
        """The table, by its published name."""
        return self.variable

    def _look_up(
        self, read: Callable[[Given], dict[str, Bags]], given: Given, training: bool, *axes: int
    ) -> tuple[Array, StepOnce]:
        """Rows of keys and weights, with these axes before the rows' own, and the function that trains them."""
        table, name = self.variable.table, self.name
        features, devices = table.collection.features, table.context.devices
        batch = inputs.prepare(features, given, devices, bounds_check="raise", what=f"layer {name!r}", read=read)
        (output,), backward = lookups.look_up_variables(
            [self.variable], [batch[name]], [self.combiner], training=training
        )
        output = output.reshape(*axes, output.shape[-1])
        backward.shapes = [output.shape]
        return output, backward

    def _read(self, given: Given) -> dict[str, Bags]:
        """The bags by name of the layer: of whole samples, with as many keys as agreed."""
        context, what = self.variable.table.context, f"layer {self.name!r}"
        bags = lookups.key_bags(*given, self.name)
        if bags.num_bags % self.slot_num:
            raise ValueError(
                f"{what}: {bags.num_bags} bags do not make samples of slot_num={self.slot_num} each; pass "
                "[batch, slot_num, keys] or [batch * slot_num, keys]."
            )
        if bags.dense_shape is not None:  # known inside `jit`, too
            lengths = np.full(bags.num_bags, math.prod(bags.dense_shape[1:]))
        elif inputs.is_unknown(bags):
            return {self.name: bags}  # which the core refuses
        else:
            lengths = np.diff(np.asarray(bags.offsets))
        is_wrong, limit = lengths > self.max_nnz, "at most {} per bag were agreed (max_nnz)"
        if self.combiner == "none":
            is_wrong, limit = lengths != self.max_nnz, "exactly {} per slot were agreed (nnz_per_slot)"
        if is_wrong.any():
            place, agreed = int(is_wrong.argmax()), limit.format(self.max_nnz)
            raise ValueError(f"{what}: bag {place} has {lengths[place]} keys, but {agreed}; change one of them.")
        if not inputs.is_unknown(bags):
            context.check_batch(bags.num_bags // self.slot_num, what)
        return {self.name: bags}


class DistributedEmbedding(_Layer):
    """Pooled rows of `slot_num` features that share one table, spread over all devices.

    `layer(keys)` looks up; a key without a row reads as zeros. `out, backward = layer.vjp(keys)` is the lookup of a
    training step: new keys read as what their rows are going to start from, and `backward(d_out)` gives them rows and
    steps every row that was read, once. Works eagerly and under `nnx.jit`, which copies a table that is not donated
    (`donate_argnums`). The result does not depend on the number of devices.

    Args:
      combiner: "sum", "mean" or "sqrtn" over the keys of a slot; capitals do not matter.
      max_vocabulary_size_per_gpu: rows on each device.
      embedding_vec_size: length of a row; any.
      slot_num: features of a sample. They share the keys: encode the feature into the key where they should not.
      max_nnz: most keys of a slot.
      max_feature_num: most keys of a sample, accepted as published; no buffer has its size.
      use_hashtable: keys of any size get rows when they are first trained; else keys are numbers below
        `max_vocabulary_size_per_gpu * devices`.
      name: of the table, for messages, initial rows and dumps.
      **options: `key_dtype`, `embedding_initializer`, `optimizer`, `context`, `rngs` and policies, see
        `embedding_variable`.

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
        known = lookups.checked_combiner(combiner, f"layer {name!r}: combiner")
        sizes = max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, max_nnz
        super().__init__(name, *sizes, use_hashtable, known, **options)

    def __call__(
        self, keys: KeysOfBags, weights: WeightsOfKeys = None, *, training: bool = False
    ) -> Float[Array, "batch slot_num dim"]:
        """Pooled rows, cut among the devices by sample.

        Args:
          keys: `[batch, slot_num, keys]` or `[batch * slot_num, keys]` of integers, -1 (signed dtypes) for none;
            `Keys` of such a shape; `Bags` or lists with one bag per sample and slot. Of this process alone where there
            are several.
          weights: one per key; None means ones.
          training: new keys read as what their rows are going to start from, else as zeros.

        Raises:
          TypeError or ValueError: naming table, position and the way out.
          RuntimeError: the table is full, see `when_full` of `rsembed.Hashed`.
        """
        return self._look_up(self._read, (keys, weights), training, -1, self.slot_num)[0]

    def vjp(
        self, keys: KeysOfBags, weights: WeightsOfKeys = None
    ) -> tuple[Float[Array, "batch slot_num dim"], StepOnce]:
        """The lookup of a training step, and `backward(d_out)`; see `__call__` for the arguments."""
        return self._look_up(self._read, (keys, weights), True, -1, self.slot_num)


class All2AllDenseEmbedding(_Layer):
    """One row per key, without pooling, from a table that is spread over all devices.

    Used like `DistributedEmbedding`. With `dynamic_input`, keys are a list of any length, such as the result of a
    `unique`, and rows come back in its order. Where there are several processes, their lists are equally long (-1 fills
    one up), and so are their parts of the result, in which zeros follow where the devices do not divide the keys.

    Args:
      max_vocabulary_size_per_gpu: rows on each device.
      embedding_vec_size: length of a row; any.
      slot_num: features of a sample, which share the keys.
      nnz_per_slot: keys of every slot.
      dynamic_input: keys are `[any number]` instead of `[batch, slot_num, nnz_per_slot]`.
      use_hashtable: as in `DistributedEmbedding`.
      name: of the table, for messages, initial rows and dumps.
      **options: as in `DistributedEmbedding`.

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
        sizes = max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, nnz_per_slot
        super().__init__(name, *sizes, use_hashtable, "none", **options)
        self.dynamic_input = dynamic_input

    def __call__(self, keys: KeysOfBags, *, training: bool = False) -> Float[Array, "..."]:
        """Rows, `[batch, slot_num, nnz_per_slot, dim]`, or `[keys, dim]` with dynamic_input; zeros for key -1.

        Args:
          keys: as the class says.
          training: new keys read as what their rows are going to start from, else as zeros.

        Raises: as for `DistributedEmbedding`.
        """
        return self._rows(keys, training)[0]

    def vjp(self, keys: KeysOfBags) -> tuple[Float[Array, "..."], StepOnce]:
        """The lookup of a training step, and `backward(d_out)`; see `__call__` for the arguments."""
        return self._rows(keys, True)

    def _rows(self, keys: KeysOfBags, training: bool) -> tuple[Array, StepOnce]:
        if not self.dynamic_input:
            return self._look_up(self._read, (keys, None), training, -1, self.slot_num, self.max_nnz)
        output, backward = self._look_up(self._read_list, (keys, None), training, -1)
        num_keys = lookups.key_bags(keys, None, self.name).num_bags
        if self.variable.table.context.devices.num_processes == 1 and output.shape[0] > num_keys:
            backward.num_padded, output = output.shape[0] - num_keys, output[:num_keys]
            backward.shapes = [output.shape]
        return output, backward

    def _read_list(self, given: Given) -> dict[str, Bags]:
        """One bag for each key, and empty ones up to a number that divides among the devices."""
        devices, bags = self.variable.table.context.devices, lookups.key_bags(*given, self.name)
        if bags.num_bags and bags.dense_shape != (bags.num_bags,):
            raise ValueError(f"layer {self.name!r}: dynamic_input takes a flat list of keys, got {describe(given[0])}.")
        keys, what = bags.ids, f"feature {self.name!r}"
        if not isinstance(keys, Keys):
            check_not_cut(keys, cast(str, self.variable.table.spec.storage.key_dtype), what)
            keys = split_keys(keys, feature=what)
        num_shares = devices.num_devices // (1 if inputs.is_unknown(bags) else devices.num_processes)
        xp: Any = np if isinstance(keys.low, np.ndarray) else jnp
        filled = jax.tree.map(lambda lane: xp.pad(lane, (0, -lane.shape[0] % num_shares)), keys)
        return {self.name: lookups.key_bags(filled, None, self.name)}
