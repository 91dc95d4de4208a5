"""Specs, tables and device runs for the cases of `tests/data/sparsecore_cases.json`.

Each case has `inputs`, `expected` and `tolerance`. A number matches if
`abs(got - expected) <= tolerance * (1 + abs(expected))`. A null among numbers means NaN.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from tests.sparsecore import small_world
from tests.sparsecore.small_world import ragged
from tests.world import mesh_of

CASES = json.loads((Path(__file__).parent.parent / "data" / "sparsecore_cases.json").read_text())

OPTIMIZERS = {
    "sgd": embedding_spec.SGDOptimizerSpec,
    "adagrad": embedding_spec.AdagradOptimizerSpec,
    "adam": embedding_spec.AdamOptimizerSpec,
    "adagrad_momentum": embedding_spec.AdagradMomentumOptimizerSpec,
    "ftrl": embedding_spec.FTRLOptimizerSpec,
    "laprop": embedding_spec.LaPropOptimizerSpec,
    "f2a": embedding_spec.F2AOptimizerSpec,
}


def optimizer_of(fields):
    fields = dict(fields)
    return OPTIMIZERS[fields.pop("type")](**fields)


def table_of(row):
    row = dict(row)
    quantization = row.pop("quantization", None)
    config = None if quantization is None else embedding_spec.QuantizationConfig(*quantization)
    row["optimizer"] = optimizer_of(row["optimizer"])
    return embedding_spec.TableSpec(**row, quantization_config=config)


def declared_specs(spec):
    """Feature specs of a case's `spec`, in a list or dict. They are not placed yet."""
    tables = {row["name"]: table_of(row) for row in spec["tables"]}
    features = [
        embedding_spec.FeatureSpec(
            row["name"],
            tables[row["table"]],
            input_shape=(row["batch"], row["ids_per_sample"]),
            output_shape=(row["batch"], row.get("dim", tables[row["table"]].embedding_dim)),
        )
        for row in spec["features"]
    ]
    return (
        {feature.name: feature for feature in features} if spec["container"] == "dict" else features
    )


def stack_as_told(features, stack, devices, cores):
    if stack in (None, "none"):
        return
    if stack == "auto":
        table_stacking.auto_stack_tables(features, devices, cores)
        return
    for group in stack:
        table_stacking.stack_tables(
            features,
            group["tables"],
            devices,
            cores,
            rotation=group.get("rotation"),
            stack_name=group.get("stack_name"),
        )


def placed_specs(spec):
    features = declared_specs(spec)
    stack_as_told(features, spec["stack"], spec["devices"], spec["cores"])
    embedding.prepare_feature_specs_for_training(features, spec["devices"], spec["cores"])
    return features


def tree_like(features, by_name, convert):
    return jax.tree.map(lambda feature: convert(by_name[feature.name]), features)


def dense_or_ragged(rows):
    return np.asarray(rows, np.int32) if len({len(row) for row in rows}) == 1 else ragged(rows)


def preprocess(inputs, specs, **options):
    spec = inputs["spec"]
    weights = inputs.get("weights")
    if weights is not None:
        weights = tree_like(specs, weights, np.float32)
    return small_world.preprocess(
        specs,
        tree_like(specs, inputs["features"], dense_or_ragged),
        weights,
        devices=spec["devices"],
        cores=spec["cores"],
        local=inputs.get("local_devices"),
        **options,
    )


def table_values(spec, expected_values=None):
    """Logical tables by name: `expected_values` if there are any, else generated tables.

    Row `r`, column `c` of the generated table `i` is `100*i + r + c/8`.
    """
    if expected_values is not None:
        return {name: np.asarray(rows, np.float32) for name, rows in expected_values.items()}
    values = {}
    for i, row in enumerate(spec["tables"]):
        shape = (row["vocabulary_size"], row["embedding_dim"])
        values[row["name"]] = np.fromfunction(
            lambda r, c, i=i: 100 * i + r + c / 8, shape, dtype=np.float32
        )
    return values


def variables_of(specs, tables):
    """Embedding variables with these logical tables and initial slots."""
    stacks, variables = embedding.get_stacked_table_specs(specs), {}
    num_shards = next(iter(stacks.values())).num_shards
    stacked = table_stacking.stack_and_shard_tables(
        embedding.get_table_specs(specs), tables, num_shards, 0.0
    )
    for name, stack in stacks.items():
        array = jnp.asarray(stacked[name].reshape(-1, stack.stack_embedding_dim))
        slots = stack.optimizer.init_slots(array)
        variables[name] = embedding.EmbeddingVariables(array, stack.optimizer.pack_slots(slots))
    return variables


def on_devices(function, num_devices):
    """Maps a function of device-local arrays over global arrays.

    A single device needs no mesh.
    """
    if num_devices == 1:
        return jax.jit(function)
    mesh = mesh_of(num_devices)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )


def lookup_and_update(specs, num_devices, **options):
    """A function that returns the activations of a batch and the updated variables.

    The function runs on each device. Only the lookup gets `num_devices`, the update determines it.
    """

    def run(processed, variables, gradients):
        arguments = (processed, variables, specs)
        activations = embedding.sparse_dense_matmul(
            *arguments, global_device_count=num_devices, **options
        )
        return activations, embedding.sparse_dense_matmul_grad(gradients, *arguments, **options)

    return run


def assert_matches(got, expected, tolerance):
    got = np.asarray(got, np.float64)
    # None becomes NaN.
    wanted = np.asarray(expected, np.float64)
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    error = np.abs(got - wanted) / (1 + np.abs(wanted))
    assert np.nanmax(error, initial=0.0) <= tolerance, f"largest error {np.nanmax(error)}"
