"""What the page on PyTorch says of arguments, against loops in numpy, and against torch where it is installed."""

import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
ROWS, DIM, PADDING = 10, 4, 3
ARGUMENTS = {
    "nn.EmbeddingBag": [
        *(
            "num_embeddings",
            "embedding_dim",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "mode",
            "sparse",
            "_weight",
        ),
        *(
            "include_last_offset",
            "padding_idx",
            "device",
            "dtype",
            "input",
            "offsets",
            "per_sample_weights",
            "freeze",
        ),
    ],
    "nn.Embedding": [
        *(
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "sparse",
        ),
        *("_weight", "_freeze", "device", "dtype"),
    ],
    "EmbeddingBagConfig": [
        *(
            "num_embeddings",
            "embedding_dim",
            "name",
            "data_type",
            "feature_names",
            "weight_init_max",
        ),
        *(
            "weight_init_min",
            "num_embeddings_post_pruning",
            "init_fn",
            "need_pos",
            "input_dim",
            "total_num_buckets",
        ),
        *(
            "use_virtual_table",
            "virtual_table_eviction_policy",
            "enable_embedding_update",
            "stash_weights",
            "pooling",
        ),
    ],
    "KeyedJaggedTensor": [
        *(
            "keys",
            "values",
            "weights",
            "lengths",
            "offsets",
            "stride",
            "stride_per_key_per_rank",
            "stride_per_key",
        ),
        *(
            "length_per_key",
            "lengths_offset_per_key",
            "offset_per_key",
            "index_per_key",
            "jt_dict",
            "inverse_indices",
        ),
    ],
}
"""Arguments of the constructors (and of `forward` and `from_pretrained`) of torch 2.13.0 and TorchRec 1.8.0."""


def table(name="t", combiner="sum", **fields):
    return rs.TableSpec(
        name, ROWS, DIM, combiner=combiner, optimizer=rs.optimizers.SGD(1.0), **fields
    )


def trained(spec, ids, values, scale=1.0):
    """The pooled rows of a batch, and the table after a step along their sum."""
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", spec))
    state = collection.with_tables(collection.init(jax.random.key(0)), {spec.name: values})
    batch = collection.prepare({"f": ids})
    _, (_, gradients) = rs.value_and_grad(lambda _, out: scale * out["f"].sum(), collection)(
        {}, state, batch
    )
    before = np.asarray(collection.lookup(state, batch)["f"])
    return before, np.asarray(collection.tables(collection.apply(state, gradients))[spec.name])


def pooled(values, bags, mode, weights=None):
    """Sums or means of rows, and the sum of all gradients of each row, by loops."""
    outputs = np.zeros((len(bags), DIM), np.float32)
    gradients = np.zeros((ROWS, DIM), np.float32)
    for number, bag in enumerate(bags):
        own = [1.0] * len(bag) if weights is None else weights[number]
        total = max(sum(own), 1e-9) if mode == "mean" else 1.0
        for row, weight in zip(bag, own, strict=True):
            outputs[number] += values[row] * weight / total
            gradients[row] += weight / total
    return outputs, gradients


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_page_has_a_row_for_every_argument(name):
    section = PAGE.split("## Every argument")[1]
    (rows,) = re.findall(
        rf"^\| [^|\n]*`{re.escape(name)}`.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, re.MULTILINE
    )
    named = [row.split("|")[1] for row in rows.splitlines()]
    for argument in ARGUMENTS[name]:
        found = [cell for cell in named if re.search(rf"\b{argument}\b", cell)]
        assert len(found) == 1, argument


def test_the_recorded_arguments_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for kind in ("EmbeddingBag", "Embedding"):
        own = getattr(torch.nn, kind)
        arguments = {*inspect.signature(own.__init__).parameters} - {"self"}
        if kind == "EmbeddingBag":
            arguments |= {*inspect.signature(own.forward).parameters, "freeze"} - {"self"}
        assert {*ARGUMENTS[f"nn.{kind}"]} == arguments


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_padding_index_that_becomes_minus_one_counts_nowhere_and_is_not_trained(mode, values):
    ids = np.array([[1, PADDING, 2], [PADDING, PADDING, PADDING], [4, 4, PADDING]])
    outputs, rows = trained(table(combiner=mode), np.where(ids == PADDING, -1, ids), values)
    wanted, gradients = pooled(values, [[1, 2], [], [4, 4]], mode)
    assert_allclose(outputs, wanted, atol=1e-6)
    assert_allclose(rows, values - gradients, atol=1e-6)
    assert_array_equal(rows[PADDING], values[PADDING])
    if mode == "mean":
        kept, _ = trained(table(combiner=mode), ids, values)
        assert not np.allclose(kept[0], wanted[0])  # left as it is, it counts
    compare_with_torch(ids, values, outputs, mode=mode, padding_idx=PADDING)


def compare_with_torch(ids, values, outputs, **options):
    """The same outputs come from torch, where it is installed."""
    try:
        import torch
    except ImportError:
        return
    module = torch.nn.EmbeddingBag(ROWS, DIM, _weight=torch.tensor(values), **options)
    assert_allclose(module(torch.tensor(ids)).detach().numpy(), outputs, atol=1e-6)


def test_a_padded_id_of_a_table_without_a_combiner_has_a_vector_of_zeros(values):
    ids = np.array([1, PADDING, 2])
    outputs, _ = trained(table(combiner="none"), np.where(ids == PADDING, -1, ids), values)
    assert_array_equal(outputs, [values[1], np.zeros(DIM), values[2]])


def test_offsets_have_the_last_one_and_weights_are_those_of_samples(values):
    ids, offsets = np.array([1, 2, 2, 5]), np.array([0, 3], np.int32)
    weights = np.array([0.5, 2.0, 1.0, 3.0], np.float32)
    bags = rs.Bags(ids, np.append(offsets, np.int32(len(ids))), weights)
    outputs, rows = trained(table(), bags, values)
    wanted, gradients = pooled(values, [[1, 2, 2], [5]], "sum", [weights[:3], weights[3:]])
    assert_allclose(outputs, wanted, atol=1e-6)
    assert_allclose(rows, values - gradients, atol=1e-6)


def test_a_frozen_table_and_a_range_of_initial_values(values):
    frozen = rs.TableSpec("t", ROWS, DIM, combiner="sum", optimizer=rs.optimizers.SGD(0.0))
    _, rows = trained(frozen, np.array([[1, 2]]), values)
    assert_array_equal(rows, values)
    drawn = table(
        initializer=lambda key, shape: jax.random.uniform(key, shape, minval=-0.25, maxval=0.75)
    )
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", drawn))
    rows = np.asarray(collection.tables(collection.init(jax.random.key(0)))["t"])
    assert -0.25 <= rows.min() < 0 and 0.5 < rows.max() <= 0.75


def test_a_keyed_jagged_tensor_becomes_a_batch_by_the_recipe_of_the_page(values):
    recipe = re.findall(r"```python\n(def to_batch.*?)```", PAGE, re.DOTALL)[0]
    names = {"rs": rs}
    exec(compile(recipe, "docs/torch.md", "exec"), names)
    lengths = np.array([2, 0, 1, 1, 1, 3])
    weights = np.arange(1, 9, dtype=np.float32)
    batch = names["to_batch"](["a", "b"], np.arange(8), lengths, weights)
    specs = [table("a"), table("b")]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(spec.name, spec) for spec in specs])
    state = collection.with_tables(collection.init(jax.random.key(0)), {"a": values, "b": values})
    out = collection.lookup(state, collection.prepare(batch))
    wanted = {
        "a": ([[0, 1], [], [2]], [[1, 2], [], [3]]),
        "b": ([[3], [4], [5, 6, 7]], [[4], [5], [6, 7, 8]]),
    }
    for name, (bags, own) in wanted.items():
        assert_allclose(out[name], pooled(values, bags, "sum", own)[0], rtol=1e-5)
