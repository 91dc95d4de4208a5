"""Arguments on the page on PyTorch, compared with loops in numpy, and with torch if installed."""

import importlib.util
import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.kernels.contract import IdList
from tests.oracles import pooled_lookup

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
ROWS, DIM, PADDING = 10, 4, 3
ARGUMENTS = {}
for line in """\
nn.EmbeddingBag
    num_embeddings embedding_dim max_norm norm_type scale_grad_by_freq mode sparse _weight
    include_last_offset padding_idx device dtype input offsets per_sample_weights freeze
nn.Embedding
    num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse
    _weight _freeze device dtype
EmbeddingBagConfig
    num_embeddings embedding_dim name data_type feature_names weight_init_max weight_init_min
    num_embeddings_post_pruning init_fn need_pos input_dim total_num_buckets use_virtual_table
    virtual_table_eviction_policy enable_embedding_update stash_weights pooling
KeyedJaggedTensor
    keys values weights lengths offsets stride stride_per_key_per_rank stride_per_key
    length_per_key lengths_offset_per_key offset_per_key index_per_key jt_dict inverse_indices
""".splitlines():
    if line.startswith(" "):
        ARGUMENTS[name] += line.split()
    else:
        name = line
        ARGUMENTS[name] = []
"""Arguments of constructors, `forward` and `from_pretrained` in torch 2.13.0 and TorchRec 1.8.0."""


def table(name="t", combiner="sum"):
    return rs.TableSpec(name, ROWS, DIM, combiner=combiner, optimizer=rs.optimizers.SGD(1.0))


def trained(spec, ids, values):
    """Pooled rows of a batch, and the table after a step with gradients of 1."""
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", spec))
    state = collection.with_tables(collection.init(jax.random.key(0)), {"t": values})
    pooled = collection.lookup(state, {"f": ids})
    state = collection.update(state, {"f": ids}, jax.tree.map(np.ones_like, pooled))
    return np.asarray(pooled["f"]), np.asarray(collection.tables(state)["t"])


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
        cells = [cell for cell in named if re.search(rf"\b{argument}\b", cell)]
        assert len(cells) == 1, argument


def test_the_recorded_arguments_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for kind in ("EmbeddingBag", "Embedding"):
        module_class = getattr(torch.nn, kind)
        arguments = {*inspect.signature(module_class.__init__).parameters} - {"self"}
        if kind == "EmbeddingBag":
            arguments |= {*inspect.signature(module_class.forward).parameters, "freeze"} - {"self"}
        assert {*ARGUMENTS[f"nn.{kind}"]} == arguments


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_padding_index_that_becomes_minus_one_counts_nowhere_and_is_not_trained(mode, values):
    ids = np.array([[1, PADDING, 2], [PADDING, PADDING, PADDING], [4, 4, PADDING]])
    outputs, rows = trained(table(combiner=mode), np.where(ids == PADDING, -1, ids), values)
    share = {"sum": 1.0, "mean": 0.5}[mode]
    wanted = share * np.stack([values[1] + values[2], np.zeros(DIM), values[4] + values[4]])
    assert_allclose(outputs, wanted, atol=1e-6)
    gradients = np.zeros((ROWS, 1))
    gradients[[1, 2, 4], 0] = share, share, 2 * share
    assert_allclose(rows, values - gradients, atol=1e-6)
    assert_array_equal(rows[PADDING], values[PADDING])
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    module = torch.nn.EmbeddingBag(
        ROWS, DIM, _weight=torch.tensor(values), mode=mode, padding_idx=PADDING
    )
    assert_allclose(module(torch.tensor(ids)).detach().numpy(), outputs, atol=1e-6)


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
    offsets = np.append(0, np.cumsum(lengths))
    for name, own_offsets in (("a", offsets[:4]), ("b", offsets[3:])):
        expected = pooled_lookup(values, IdList(np.arange(8), own_offsets, weights), "sum")
        assert_allclose(out[name], expected, rtol=1e-5)
