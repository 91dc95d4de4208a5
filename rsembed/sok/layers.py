"""The two layers of the Sparse Operation Kit: pooled and un-pooled lookups of tables over the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rsembed.bags import device_copy
from rsembed.checks import PositiveInt, validated
from rsembed.keys import Keys
from rsembed.parallel import Agreement
from rsembed.row_gradients import check_gradient
from rsembed.sok.key_bags import KeyBags, bring, checked_combiner, read_keys, widened
from rsembed.sok.lookups import StepOnce, look_up_variables
from rsembed.sok.variables import EmbeddingVariable, embedding_variable
from rsembed.specs import Combiner


class _Layer(nnx.Module):
    """A table over the devices, and how a batch of `slot_num` features a sample is read from it."""

    def __init__(
        self,
        name: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        use_hashtable: bool,
        *,
        embedding_initializer: str | Callable[..., Array] = "uniform",
        **options: Any,
    ):
        self.slot_num, self.max_nnz = slot_num, max_nnz
        self.variable: EmbeddingVariable = embedding_variable(
            name,
            embedding_vec_size,
            rows_per_device=max_vocabulary_size_per_gpu,
            use_hashtable=use_hashtable,
            initializer=embedding_initializer,
            **options,
        )

    @property
    def name(self) -> str:
        """The table's name."""
        return self.variable.table.spec.name

    @property
    def embedding_variable(self) -> EmbeddingVariable:
        """The table, by its published name."""
        return self.variable

    def _agreement(self, *given: Any) -> Agreement:
        return Agreement(self.variable.table.context.mesh, f"layer {self.name!r}", given)

    def _read(self, agreement: Agreement, value: Any, weights: Any, combiner: Combiner) -> KeyBags:
        """The batch as this process was given it."""
        bags = read_keys(self.variable.table, value, weights, combiner, width=self.max_nnz)
        num_bags = bags.keys.shape[0]
        if num_bags % self.slot_num:
            raise ValueError(
                f"layer {self.name!r}: {num_bags} bags do not make samples of slot_num={self.slot_num} each; pass "
                "[batch, slot_num, keys] or [batch * slot_num, keys]."
            )
        context, what = self.variable.table.context, f"layer {self.name!r}"
        bring(agreement, "keys", bags, context, what, bags_per_sample=self.slot_num)
        return bags

    def _look_up(self, bags: KeyBags, training: bool, *shape: int) -> tuple[Array, StepOnce]:
        """Output of this shape, but for the rows' own axis."""
        (output,), backward = look_up_variables([self.variable], [bags], training=training)
        output = output.reshape(*shape, output.shape[-1])
        backward.shapes = [output.shape]
        return output, backward


class DistributedEmbedding(_Layer):
    """Pooled rows of `slot_num` features that share one table, spread over all devices.

    `layer(keys)` looks up; a key without a row reads as zeros. `out, backward = layer.vjp(keys)` is the lookup of a
    training step: new keys get rows, and `backward(d_out)` steps every row that was read, once. Works eagerly and under
    `nnx.jit`. The result does not depend on the number of devices.

    Args:
      combiner: "sum", "mean" or "sqrtn" over the keys of a slot; capitals do not matter.
      max_vocabulary_size_per_gpu: rows on each device.
      embedding_vec_size: length of a row; any.
      slot_num: features of a sample. They share the keys: encode the feature into the key where they should not.
      max_nnz: most keys of a slot.
      max_feature_num: most keys of a sample, checked on the host; None means `slot_num * max_nnz`. It is
        `exchange_capacity` that sizes buffers.
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
        self.combiner = checked_combiner(combiner, f"layer {name!r}: combiner")
        super().__init__(
            name, max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, max_nnz, use_hashtable, **options
        )
        self.max_feature_num = slot_num * max_nnz if max_feature_num is None else max_feature_num

    def __call__(self, keys: Any, weights: Any = None, *, training: bool = False) -> Float[Array, "batch slot_num dim"]:
        """Pooled rows, cut among the devices by sample.

        Args:
          keys: `[batch, slot_num, keys]` or `[batch * slot_num, keys]` of integers, -1 (signed dtypes) for none;
            `Keys` of such a shape; `Bags` or lists with one bag per sample and slot. Of this process alone where there
            are several.
          weights: one per key; None means ones.
          training: give new keys rows.

        Raises:
          TypeError or ValueError: naming table, position and the way out.
          RuntimeError: the table is full, see `when_full` of `rsembed.Hashed`.
        """
        return self._pooled(keys, weights, training)[0]

    def vjp(self, keys: Any, weights: Any = None) -> tuple[Float[Array, "batch slot_num dim"], StepOnce]:
        """The lookup of a training step, and `backward(d_out)`; see `__call__` for the arguments."""
        return self._pooled(keys, weights, True)

    def _pooled(self, keys: Any, weights: Any, training: bool) -> tuple[Array, StepOnce]:
        with self._agreement(keys, weights) as agreement:
            bags = self._read(agreement, keys, weights, self.combiner)
            self._check_samples(bags.keys.is_key)
        return self._look_up(widened(bags, agreement.width("keys")), training, -1, self.slot_num)

    def _check_samples(self, is_key: Any) -> None:
        if self.max_feature_num == self.slot_num * self.max_nnz or not isinstance(is_key, np.ndarray):
            return
        used = is_key.reshape(-1, self.slot_num * is_key.shape[-1]).sum(axis=1)
        if used.max(initial=0) > self.max_feature_num:
            raise ValueError(
                f"layer {self.name!r}: sample {int(used.argmax())} has {int(used.max())} keys, but at most "
                f"max_feature_num={self.max_feature_num} were agreed; raise it, or cut the sample."
            )


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
        super().__init__(
            name, max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, nnz_per_slot, use_hashtable, **options
        )
        self.dynamic_input = dynamic_input

    def __call__(self, keys: Any, *, training: bool = False) -> Float[Array, "..."]:
        """Rows, `[batch, slot_num, nnz_per_slot, dim]`, or `[keys, dim]` with dynamic_input; zeros for key -1.

        Args:
          keys: as the class says.
          training: give new keys rows.

        Raises: as for `DistributedEmbedding`.
        """
        return self._rows(keys, training)[0]

    def vjp(self, keys: Any) -> tuple[Float[Array, "..."], Callable[[Any], None]]:
        """The lookup of a training step, and `backward(d_out)`; see `__call__` for the arguments."""
        return self._rows(keys, True)

    def _rows(self, keys: Any, training: bool) -> tuple[Array, Callable[[Any], None]]:
        with self._agreement(keys) as agreement:
            keys = self._as_array(keys)
            if self.dynamic_input:
                bags = read_keys(self.variable.table, jax.tree.map(lambda lane: lane[:, None], keys), None, "none")
                agreement.bring("keys", "a list of keys", width=self._places(bags.keys.is_key))
            else:
                bags = self._read(agreement, keys, None, "none")
        if self.dynamic_input:
            return self._rows_of_list(bags, agreement.width("keys"), training)
        return self._look_up(bags, training, -1, self.slot_num, self.max_nnz)

    def _as_array(self, keys: Any) -> Any:
        if not isinstance(keys, (Keys, jax.Array)):
            try:
                keys = np.asarray(keys)
            except ValueError as error:
                raise ValueError(
                    f"layer {self.name!r}: all slots need equally many keys; fill them up with -1, or use "
                    "DistributedEmbedding for ragged ones."
                ) from error
        if self.dynamic_input and len(keys.shape) != 1:
            raise ValueError(f"layer {self.name!r}: dynamic_input takes a list of keys, got shape {keys.shape}.")
        if not self.dynamic_input and keys.shape[1:] != (self.slot_num, self.max_nnz):
            raise ValueError(
                f"layer {self.name!r}: keys have shape {keys.shape}, but [batch, {self.slot_num}, {self.max_nnz}] were "
                "agreed (slot_num, nnz_per_slot); pass dynamic_input=True for lists of any length."
            )
        return keys

    def _places(self, is_key: Any) -> int:
        """Keys of a list, so many more that all devices get equally many: those of this process if it is its own."""
        context = self.variable.table.context
        devices = context.num_devices if isinstance(is_key, jax.Array) else context.num_local_devices
        return -(-is_key.shape[0] // (devices * self.slot_num)) * devices * self.slot_num

    def _rows_of_list(self, bags: KeyBags, places: int, training: bool) -> tuple[Array, Callable[[Any], None]]:
        num_keys, context = bags.keys.shape[0], self.variable.table.context
        is_part = isinstance(bags.keys.is_key, np.ndarray) and context.num_local_devices < context.num_devices
        missing = places - num_keys
        padded = dataclasses.replace(bags, keys=jax.tree.map(lambda lane: _padded(lane, missing), bags.keys))
        output, backward = self._look_up(padded, training, -1)
        if is_part or not missing:
            return output, backward

        def backward_of_keys(d_output: Any) -> None:
            check_gradient(d_output, f"table {self.variable.table.spec.name!r}: the gradient")
            backward(_padded(device_copy(d_output, jnp.float32), missing))

        return output[:num_keys], backward_of_keys


def _padded(array: Any, missing: int) -> Any:
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    return xp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
