"""A next-word model with one table, trained with the calls of the published Shakespeare tutorial.

`tutorial_program.py FOLDER` takes part in a run of several processes. It prints a line of JSON with
the losses of all steps, and the results of one step with minibatches.
"""

import functools
import json
import sys
import tempfile

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rsembed import parallel
from rsembed.fdo import file_fdo_client
from rsembed.sparsecore import embedding, embedding_spec
from rsembed.sparsecore.linen import embed, embed_optimizer
from tests.sparsecore import minibatch_program

VOCABULARY, BATCH, LENGTH, DIM, LEARNING_RATE = 2048, 256, 16, 16, 0.005
FEATURE = "words"
SHARDS = 32
NUM_STEPS = 8
"""Limits change after step 5, so 8 steps use new limits. The published run has 100 steps."""


def make_batch(word_ids):
    """Windows of a text, and the word after each window. All steps train on this batch."""
    windows = (np.arange(BATCH)[:, None] + np.arange(LENGTH)) % len(word_ids)
    return word_ids[windows], word_ids[(np.arange(BATCH) + LENGTH) % len(word_ids)]


def synthetic_text():
    """A text of 400 words. A few words are frequent, as in a language."""
    words = np.random.default_rng(7).zipf(1.3, 400)
    return np.clip(words, 1, VOCABULARY - 1).astype(np.int32)


class NextWord(nn.Module):
    specs: embedding.Nested[embedding_spec.FeatureSpec]
    mesh: Mesh
    # None: the layer's counter.
    step: int | None

    @nn.compact
    def __call__(self, inputs):
        layer = embed.SparseCoreEmbed(
            feature_specs=self.specs, mesh=self.mesh, sharding_axis="device"
        )
        context = layer(inputs, self.step)[FEATURE].reshape(BATCH, LENGTH * DIM)
        context = jax.lax.with_sharding_constraint(context, NamedSharding(self.mesh, P("device")))
        return nn.Dense(VOCABULARY)(nn.Dense(DIM)(context))


def word_specs(num_devices, num_cores):
    table = embedding_spec.TableSpec(
        "word_table",
        VOCABULARY,
        DIM,
        initializer=jax.nn.initializers.normal(),
        optimizer=embedding_spec.AdamOptimizerSpec(learning_rate=LEARNING_RATE),
        combiner="sum",
        max_ids_per_partition=128,
        max_unique_ids_per_partition=64,
    )
    samples = BATCH * LENGTH
    feature = embedding_spec.FeatureSpec(
        FEATURE, table, input_shape=(samples, 1), output_shape=(samples, DIM)
    )
    specs = nn.FrozenDict({FEATURE: feature})
    embedding.prepare_feature_specs_for_training(
        specs, global_device_count=num_devices, num_sc_per_device=num_cores
    )
    return specs


def preprocess(contexts, specs, num_local, num_devices, num_cores):
    """The preprocessed contexts with weights of 1, and their statistics."""
    features = nn.FrozenDict({FEATURE: contexts.reshape(-1, 1)})
    weights = jax.tree.map(lambda ids: np.ones(ids.shape, np.float32), features)
    return embedding.preprocess_sparse_dense_matmul_input(
        features, weights, specs, num_local, num_devices, num_sc_per_device=num_cores
    )


def step_of(model, tx, shardings):
    """The compiled training step, for parameters with these shardings."""
    data, replicated = NamedSharding(model.mesh, P("device")), NamedSharding(model.mesh, P())

    @functools.partial(
        jax.jit,
        in_shardings=(shardings, data, data, replicated),
        out_shardings=(shardings, replicated, None),
        donate_argnums=(0,),
    )
    def train_step(params, inputs, labels, opt_state):
        def loss_of(params, inputs, labels):
            logits = model.apply(params, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of, allow_int=True)(params, inputs, labels)
        # Adam of optax mixes its integer step with floats.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state)
        return embed_optimizer.apply_updates_for_sc_model(params, updates), opt_state, loss

    return train_step


def train(batch, fdo_folder, *, num_devices, num_steps, step=None):
    """Loss of each step. The limits are updated from the statistics, as in the tutorial."""
    mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("device",))
    data = NamedSharding(mesh, P("device"))
    num_cores = SHARDS // num_devices
    specs = word_specs(num_devices, num_cores)
    model = NextWord(specs, mesh, step)
    share = BATCH // jax.process_count()
    contexts, labels = (array[jax.process_index() * share :][:share] for array in batch)

    def to_devices(array):
        return jax.make_array_from_process_local_data(data, array)

    def next_inputs():
        processed, stats = preprocess(contexts, specs, mesh.local_mesh.size, mesh.size, num_cores)
        return jax.tree.map(to_devices, processed), stats

    inputs, _ = next_inputs()
    abstract = jax.eval_shape(model.init, jax.random.key(42), inputs)
    shardings, replicated = nn.get_sharding(abstract, mesh), NamedSharding(mesh, P())
    params = jax.jit(model.init, in_shardings=(replicated, data), out_shardings=shardings)(
        jax.random.key(42), inputs
    )
    tx = embed_optimizer.create_optimizer_for_sc_model(params, optax.adam(LEARNING_RATE))
    opt_state = jax.jit(tx.init, out_shardings=replicated)(params)

    train_step = step_of(model, tx, shardings)
    client = file_fdo_client.NPZFileFDOClient(fdo_folder)
    labels, losses = to_devices(labels), []
    for number in range(1, num_steps + 1):
        inputs, stats = next_inputs()
        params, opt_state, loss = train_step(params, inputs, labels, opt_state)
        losses.append(float(loss))
        client.record(stats)
        if number % 5 == 0:
            client.publish()
            embedding.update_preprocessing_parameters(specs, client.load(), num_cores)
    return losses


def final_loss(batch, *, num_steps, step=None):
    with tempfile.TemporaryDirectory() as folder:
        return train(batch, folder, num_devices=1, num_steps=num_steps, step=step)[-1]


def main(folder):
    parallel.init()
    devices = jax.device_count()
    batch = make_batch(synthetic_text())
    losses = train(batch, folder, num_devices=devices, num_steps=NUM_STEPS)
    options = {"enable_minibatching": True, "batch_number": 7}
    stepped, _ = minibatch_program.run_step(devices, minibatch_program.TIGHT, **options)
    print(json.dumps([losses, *(array.tolist() for array in stepped)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
