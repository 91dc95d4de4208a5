"""Target: random settings of tables, features and meshes. A mesh gives what one device gives, or refuses by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import rsembed as rs
from rsembed.specs import COMBINERS
from rsembed.tt import TensorTrain

Draw = np.random.Generator

SAMPLES, WIDTH, NUM_STEPS, MOST_IDS = 24, 3, 2, 33
RULES = (
    *(rs.SGDOptimizerSpec(0.1), rs.AdagradOptimizerSpec(0.1), rs.RowWiseAdagradOptimizerSpec(0.1)),
    *(rs.AdamOptimizerSpec(0.1), rs.FTRLOptimizerSpec(0.1)),
)
STORAGES = (None, None, rs.Hashed(), rs.HostCached(cache_rows=64), TensorTrain((2,)))
MESHES = ((1,), (2,), (3,), (4,), (2, 2))
# One rounding to the dtype, which sums in another order may bring to the other side.
TOLERANCES = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
FORMS = ("dense", "weighted", "lists", "weighted lists", "single ids")


class Settings(NamedTuple):
    """A model, the forms in which its features get their ids, how it is trained, and the mesh."""

    features: list[rs.FeatureSpec]
    forms: list[str]
    is_fused: bool
    is_compiled: bool
    mesh: dict[str, Any]


def draw_table(draw: Draw, name: str) -> rs.TableSpec:
    storage = STORAGES[draw.integers(len(STORAGES))]
    dtypes = [dtype for dtype in TOLERANCES if not (isinstance(storage, TensorTrain) and dtype == "float16")]
    dtype = str(draw.choice(dtypes))
    rounds = dtype != "float32" and not isinstance(storage, TensorTrain) and draw.random() < 0.3
    quantization = rs.QuantizationConfig(-1.0, 1.0, 255) if storage is None and draw.random() < 0.2 else None
    return rs.TableSpec(
        name=name,
        # One device may be the owner of all keys.
        vocabulary_size=len(MESHES) * MOST_IDS
        if isinstance(storage, rs.Hashed)
        else int(draw.choice([7, 16, MOST_IDS])),
        embedding_dim=int(draw.choice([1, 4, 8])),
        combiner=str(draw.choice(COMBINERS)),
        dtype=dtype,
        stochastic_rounding=rounds,
        quantization_config=quantization,
        storage=storage,
        optimizer=RULES[draw.integers(len(RULES))],
        initializer=jax.nn.initializers.uniform(0.5),
    )


def draw_settings(draw: Draw) -> Settings:
    tables = [draw_table(draw, f"table_{k}") for k in range(draw.integers(1, 4))]
    readers = [*tables, *(tables[k] for k in draw.integers(len(tables), size=draw.integers(3)))]
    features = [rs.FeatureSpec(name=f"feature_{k}", table_spec=table) for k, table in enumerate(readers)]
    # On a mesh, lists of a sequence come back with places for the ids that they do not have.
    forms = [str(draw.choice(FORMS[:2] if table.combiner == "none" else FORMS)) for table in readers]
    sizes = MESHES[draw.integers(len(MESHES))]
    mesh = {
        "mesh": Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("x", "y")[: len(sizes)]),
        "sharding_axis": [None, "x"][draw.integers(2)],
        "placement": [None, "row", "table", "column", "replicated"][draw.integers(5)],
        "exchange_capacity": [None, None, 1, 3, 50][draw.integers(5)],
    }
    return Settings(features, forms, draw.random() < 0.5, draw.random() < 0.7, mesh)


def draw_batch(draw: Draw, features: Sequence[rs.FeatureSpec], forms: Sequence[str]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for feature, form in zip(features, forms, strict=True):
        table = feature.table_spec
        ids = draw.integers(0, min(table.vocabulary_size, MOST_IDS), (SAMPLES, WIDTH))
        ids = ids * (2**33 + 1) if isinstance(table.storage, rs.Hashed) else ids
        weights = draw.uniform(0.5, 2.0, ids.shape).astype(np.float32)
        lengths = draw.integers(0, WIDTH + 1, SAMPLES)
        lists = [(own[:n], gains[:n]) for own, gains, n in zip(ids, weights, lengths, strict=True)]
        padded = np.where(draw.random(ids.shape) < 0.15, -1, ids)
        batch[feature.name] = {
            "dense": padded,
            "weighted": (padded, weights),
            "lists": [own.tolist() for own, _ in lists],
            "weighted lists": ([own.tolist() for own, _ in lists], [gains.tolist() for _, gains in lists]),
            "single ids": padded[:, 0],
        }[form]
    return batch


def trained(settings: Settings, seed: int, **options: Any) -> Any:
    """Activations of every step, and then the tables."""
    draw = np.random.default_rng(seed)
    collection = rs.EmbeddingCollection(settings.features, **options)

    def step(state, batch):
        found, pullback = collection.lookup_vjp(state, batch)
        d_found = jax.tree.map(lambda own: own.astype(jnp.float32) - 0.25, found)
        if settings.is_fused:
            return found, collection.update(state, batch, d_found)
        return found, collection.apply(state, pullback(d_found))

    step = jax.jit(step) if settings.is_compiled else step
    state, all_found = collection.init(jax.random.key(0)), []
    for number in range(NUM_STEPS + 1):
        batch = collection.prepare(draw_batch(draw, settings.features, settings.forms))
        state = collection.prefetch(state, batch)
        found, after = step(state, batch) if number < NUM_STEPS else (collection.lookup(state, batch), state)
        all_found.append(found)
        state = after
    # The jax of dtypes that numpy does not know.
    return jax.tree.map(
        lambda own: np.asarray(jnp.asarray(own, jnp.float32)), (all_found, values_of(collection, state))
    )


def values_of(collection: rs.EmbeddingCollection, state: Any) -> dict[str, Any]:
    """Tables by name, of hashed ones the values in the order of the keys."""
    tables = collection.tables(state)
    return {name: table["values"] if isinstance(table, dict) else table for name, table in tables.items()}


def run(seed: int) -> int:
    """One model, on one device and on a mesh."""
    compare(draw_settings(np.random.default_rng(seed)), seed)
    jax.clear_caches()
    return 1


def compare(settings: Settings, seed: int) -> None:
    """Raises: AssertionError: a mesh gives other numbers, or a refusal does not name the table."""
    try:
        many = trained(settings, seed, **settings.mesh)
    except (ValueError, NotImplementedError) as error:
        assert "table_" in str(error), f"a refusal must name the table: {error}"
        return
    one = trained(settings, seed)
    tables = [feature.table_spec for feature in settings.features]
    tolerance = max(max(TOLERANCES[table.dtype], 0.02 * bool(table.quantization_config)) for table in tables)
    for found, wanted in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=str(settings))
