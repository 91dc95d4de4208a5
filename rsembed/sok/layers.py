"""The two layers of the Sparse Operation Kit: pooled and un-pooled lookups of tables over the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rsembed.bags import Bags, check_unmasked
from rsembed.checks import PositiveInt, validated
from rsembed.collection import inputs
from rsembed.keys import Keys, split_keys
from rsembed.parallel.agreement import Agreement
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
        lookups.engine_of(((self.variable.table.kind, (combiner,)),))  # made here, not in the first step

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
        """The bags by name of the layer, of whole samples, and none of more keys than agreed."""
        context, what = self.variable.table.context, f"layer {self.name!r}"
        bags = lookups.key_bags(*given, self.name, context.devices)
        if bags.num_bags % self.slot_num:
            raise ValueError(
                f"{what}: {bags.num_bags} bags do not make samples of slot_num={self.slot_num} each; pass "
                "[batch, slot_num, keys] or [batch * slot_num, keys]."
            )
        if inputs.is_unknown(bags):
            return {self.name: bags}
        lengths = np.diff(np.asarray(bags.offsets))
        if lengths.max(initial=0) > self.max_nnz:
            raise ValueError(
                f"{what}: bag {lengths.argmax()} has {lengths.max()} keys, but at most {self.max_nnz} per bag were "
                "agreed (max_nnz); raise it, or cut the bag."
            )
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
      max_feature_num: most keys of a sample, accepted as published; it is `exchange_capacity` that sizes buffers.
      use_hashtable: keys of any size get rows when they are first trained; else keys are numbers below
        `max_vocabulary_size_per_gpu * devices`.
      name: of the table, for messages, initial rows and dumps.
      **options: `key_dtype`, `embedding_initializer`, `optimizer`, `exchange_capacity`, `context`, `rngs` and
        policies, see `embedding_variable`.

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
    `unique`, and rows come back in its order. Where there are several processes, each may have a list of another
    length: all are filled up to the longest, and the result holds the rows of the first process, then its zeros, then
    those of the second.

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
            return self._look_up(self._read_dense, (keys, None), training, -1, self.slot_num, self.max_nnz)
        devices, what = self.variable.table.context.devices, f"layer {self.name!r}"
        # Processes agree on a length first, and then on the keys.
        with Agreement(devices.known_mesh, what, keys) as agreement:
            keys = self._as_array(keys)
            if keys.ndim != 1:
                raise ValueError(f"{what}: dynamic_input takes a list of keys, got shape {keys.shape}.")
            lanes = keys if isinstance(keys, Keys) else split_keys(keys, feature=f"{what}: keys")
            is_part = devices.num_processes > 1 and not inputs.is_unknown(lanes)
            shares = devices.num_devices // (devices.num_processes if is_part else 1)
            agreement.bring("keys", "a list of keys", width=-(-lanes.shape[0] // shares) * shares)
        num_keys, missing = lanes.shape[0], agreement.width("keys") - lanes.shape[0]
        xp: Any = np if isinstance(lanes.low, np.ndarray) else jnp
        filled: Keys = jax.tree.map(lambda lane: xp.pad(lane, (0, missing)), lanes)
        bags = {self.name: lookups.key_bags(filled.reshape(-1, 1), None, self.name, devices)}
        output, backward = self._look_up(lambda _: bags, (filled, None), training, -1)
        if missing and not is_part:
            output = output[:num_keys]
            backward.shapes, backward.num_padded = [output.shape], missing
        return output, backward

    def _read_dense(self, given: Given) -> dict[str, Bags]:
        keys = self._as_array(given[0])
        if keys.shape[1:] != (self.slot_num, self.max_nnz):
            raise ValueError(
                f"layer {self.name!r}: keys have shape {keys.shape}, but [batch, {self.slot_num}, {self.max_nnz}] were "
                "agreed (slot_num, nnz_per_slot); pass dynamic_input=True for lists of any length."
            )
        return self._read((keys, None))

    def _as_array(self, keys: KeysOfBags) -> Keys | jax.Array | np.ndarray:
        check_unmasked(keys, f"layer {self.name!r}: keys")
        if isinstance(keys, (Keys, jax.Array)):
            return keys
        try:
            array = np.asarray(keys)
        except ValueError as error:
            raise ValueError(
                f"layer {self.name!r}: all slots need equally many keys; fill them up with -1, or use "
                "DistributedEmbedding for ragged ones."
            ) from error
        return array if array.size else array.astype(np.int64)  # of no keys, numpy makes floats
