import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.tt import FusedParam, OptimType, TableBatchedTTEmbeddingBag, TTEmbeddingBag, TTSpec
from tests.oracles import weight_gradients
from tests.tbe import row_formulas
from tests.tt.tt_oracles import (
    CASES,
    call_of,
    core_gradients,
    dense_table,
    looked_up,
    pooled,
    step,
    worked_cores,
)  # fmt: skip
from tests.world import assert_close


def small(**options):
    options = {"sparse": False, "use_cache": False, **options}
    return TTEmbeddingBag(10, 3, tt_ranks=[2, 2], **options)


def same_cores(module, cores):
    return all((one == other).all() for one, other in zip(module.cores_of(), cores, strict=True))


def worked(name, **options):
    inputs = CASES[name]["input"]
    emb = TTEmbeddingBag(24, 8, inputs["ranks"], inputs["p"], inputs["q"], **options)
    emb.set_cores(worked_cores(inputs, emb.spec))
    return emb, inputs, CASES[name]["expect"]


def test_the_published_calls():
    emb = TTEmbeddingBag(
        num_embeddings=1000000,
        embedding_dim=64,
        tt_p_shapes=[120, 90, 110],
        tt_q_shapes=[4, 4, 4],
        tt_ranks=[12, 14],
        sparse=True,
        optimizer=OptimType.SGD,
        learning_rate=0.05,
        eps=1.0e-10,
        weight_dist="uniform",
    )
    assert [core.shape for core in emb.cores_of()] == [(120, 48), (90, 12 * 4 * 14), (110, 56)]
    output = emb(jnp.asarray([999_999, 0]), jnp.asarray([0, 1]))
    assert output.shape == (2, 64)
    embedding_sum = TTEmbeddingBag(10, 3, None, None, tt_ranks=[2, 2], sparse=False)
    ids, offsets = jnp.asarray([1, 2, 4, 5, 4, 3, 2, 9]), jnp.asarray([0, 4])
    output = embedding_sum(ids, offsets)
    table = dense_table(embedding_sum.spec, embedding_sum.cores_of())
    assert_allclose(output, pooled(table, ids, [0, 4, 8]), rtol=1e-5, atol=1e-6)
    assert_array_equal(output, embedding_sum(ids, jnp.asarray([0, 4, 8]), warmup=False))


def test_arguments_by_position():
    one = TTEmbeddingBag(10, 3, [2, 4], [2, 5, 1], [1, 3, 1])
    assert one.spec == TTSpec(10, (2, 5, 1), (1, 3, 1), (2, 4))
    assert TTEmbeddingBag(10, 3, [2, 5, 1], [1, 3, 1], tt_ranks=[2, 4]).spec == one.spec
    adagrad = OptimType.EXACT_ADAGRAD
    options = (adagrad, 0.3, 1e-6, True, False, 0, 0, "uniform", True)
    emb = TTEmbeddingBag(10, 3, [2], [5, 2], [1, 3], *options)
    assert (emb.optimizer, emb.eps, emb.weight_dist) == (adagrad, 1e-6, "uniform")
    assert emb.sparse and not emb.use_cache
    assert float(emb.learning_rate.get_value()) == pytest.approx(0.3)
    adam = TTEmbeddingBag(10, 3, [5, 2], [1, 3], OptimType.ADAM, tt_ranks=[2])
    assert adam.optimizer is OptimType.ADAM
    options = (OptimType.SGD, 0.3, 1e-6, False)
    batched = TableBatchedTTEmbeddingBag(2, 10, 3, [2], [5, 2], [1, 3], *options)
    assert batched.num_tables == 2 and not batched.sparse and not batched.use_cache


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_every_form_of_input_is_the_same_batch(mode):
    emb = small(mode=mode)
    rows, weights = [[1, 2, 4], [], [9]], [[0.5, 2.0, -1.0], [], [3.0]]
    flat, flat_weights = np.asarray([1, 2, 4, 9]), np.asarray([0.5, 2, -1, 3], np.float32)
    dense = np.asarray([[1, 2, 4], [-1, -1, -1], [9, -1, -1]])
    dense_weights = np.asarray([[0.5, 2, -1], [0, 0, 0], [3, 0, 0]], np.float32)
    bags, table = Bags.from_lists(rows, weights), dense_table(emb.spec, emb.cores_of())
    wanted = pooled(table, flat, [0, 3, 3, 4], flat_weights, mode)
    for actual in (
        emb(jnp.asarray(flat), jnp.asarray([0, 3, 3, 4]), jnp.asarray(flat_weights)),
        emb(flat, np.asarray([0, 3, 3]), flat_weights),
        emb(dense, None, dense_weights),
        emb(jnp.asarray(dense), per_sample_weights=jnp.asarray(dense_weights)),
        emb(rows, per_sample_weights=weights),
        emb(bags),
        emb(bags.pad_to(9)),
    ):
        assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_a_last_offset_can_be_said_to_start_an_empty_bag():
    batch = jnp.asarray([1, 2]), jnp.asarray([0, 1, 2])
    assert small()(*batch).shape == (2, 3)
    assert small(include_last_offset=False)(*batch).shape == (3, 3)
    assert looked_up(small(include_last_offset=True), *batch).shape == (2, 3)


def test_sparse_false_returns_gradients_and_changes_nothing():
    emb, inputs, expect = worked("grad_dense_3core", sparse=False)
    before = emb.cores_of()
    bags = Bags(np.asarray(inputs["indices"]), np.asarray(inputs["offsets"]))
    output, gradients = step(emb, np.asarray(inputs["d_output"], np.float32), bags)
    assert_array_equal(output, CASES["bag_sum_empty_dup"]["expect"]["output"])
    for actual, wanted in zip(gradients.cores[0], expect["d_cores"], strict=True):
        assert_array_equal(actual, np.reshape(wanted, actual.shape))
    assert same_cores(emb, before)


@pytest.mark.slow_rows("EXACT_ADAGRAD-adagrad-states1")
@pytest.mark.parametrize(
    ("name", "formula", "states"),
    [
        ("SGD", row_formulas.sgd, []),
        ("EXACT_ADAGRAD", row_formulas.adagrad, ["momentum1"]),
        ("EXACT_ROWWISE_ADAGRAD", row_formulas.rowwise_adagrad, ["momentum1"]),
        ("ADAM", row_formulas.adam, ["momentum1", "momentum2"]),
    ],
)
def test_fused_rules_are_their_formulas_on_whole_cores(name, formula, states):
    options = dict(learning_rate=row_formulas.LR, eps=1e-3)
    emb, inputs, _ = worked("fused_sgd", sparse=True, optimizer=OptimType[name], **options)
    twin, _, _ = worked("fused_sgd", sparse=False)
    bags = Bags(np.asarray(inputs["indices"]), np.asarray(inputs["offsets"]))
    # Adam ignores `eps` and uses 1e-8.
    made_of = row_formulas.DEFAULTS | {"eps": 1e-8 if name == "ADAM" else 1e-3}
    wanted = [np.float64(core) for core in emb.cores_of()]
    kept = [[dict.fromkeys(states, 0.0) for _ in core] for core in wanted]
    for number, scale in enumerate((1.0, -0.5)):
        d_output = scale * np.asarray(inputs["d_output"], np.float32)
        twin.set_cores(emb.cores_of())
        gradients = step(twin, d_output, bags)[1].cores[0]
        step(emb, d_output, bags)
        for t, gradient in enumerate(gradients):
            rows = zip(wanted[t], np.float64(gradient), kept[t], strict=True)
            wanted[t] = np.stack([formula(*row, number + 1, made_of) for row in rows])
    assert_close(list(emb.cores_of()), wanted, rtol=2e-5, atol=2e-6)


def test_a_new_learning_rate_compiles_nothing():
    emb, ids, num_traces = small(sparse=True), jnp.asarray([[1, 2], [3, -1]]), 0

    @nnx.jit
    def counted_step(emb):
        nonlocal num_traces
        num_traces += 1
        emb.vjp(ids)[1](jnp.ones((2, 3)))

    for rate in (0.5, 0.0):
        emb.set_learning_rate(rate)
        before = jax.tree.map(np.asarray, emb.cores_of())
        counted_step(emb)
        assert same_cores(emb, before) == (rate == 0.0)
    assert num_traces == 1


def test_optax_trains_the_cores_of_sparse_false_through_nnx_and_sees_no_others():
    emb, fused = small(), small(sparse=True)
    assert len(jax.tree.leaves(nnx.state(fused, nnx.Param))) == 0
    assert len(jax.tree.leaves(nnx.state(fused, FusedParam))) == 3
    assert len(jax.tree.leaves(nnx.state(emb, nnx.Param))) == 3
    optimizer = nnx.Optimizer(emb, optax.adam(0.05), wrt=nnx.Param)
    ids, target = jnp.arange(10)[:, None], jnp.linspace(-1, 1, 30).reshape(10, 3)

    @nnx.jit
    def step(emb, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(ids) - target) ** 2))(emb)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(emb, gradients)
        return loss

    losses = [float(step(emb, optimizer)) for _ in range(150)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("options", [{}, {"use_cache": True, "cache_size": 4}, {"sparse": False}])
def test_a_module_that_an_interrupted_step_took_over_says_how_to_go_on_and_does(options):
    module, ids = TTEmbeddingBag(12, 4, tt_ranks=[2], **options), np.array([[1], [2]])
    saved, before = jax.tree.map(jnp.copy, nnx.state(module)), module(ids)
    for leaf in jax.tree.leaves(nnx.state(module)):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    for call in (lambda: module(ids), lambda: module.vjp(ids), module.full_weight):
        with pytest.raises(
            RuntimeError, match=r"TTEmbeddingBag has lost its cores .* Ctrl-C .* nnx.update"
        ):
            call()
    nnx.update(module, saved)
    assert_array_equal(module(ids), before)


def test_parameters_are_reset_with_their_state_to_any_distribution():
    emb = small(sparse=True, optimizer=OptimType.EXACT_ADAGRAD)
    first = jax.tree.map(np.asarray, emb.cores_of())
    step(emb, np.ones((1, 3), np.float32), np.asarray([[1, 2]]))
    emb.reset_parameters(rngs=nnx.Rngs(0))
    assert same_cores(emb, first)
    assert not any(np.asarray(state).any() for state in emb.optimizer_state)
    emb.reset_parameters("uniform")
    assert not any((one == other).any() for one, other in zip(first, emb.cores_of(), strict=True))


def test_gradients_of_weights_are_returned_by_fused_steps_too():
    """Outside `jit`, ids are padded, but the returned gradients are not."""
    ids, offsets = np.array([5, 9, 5]), np.array([0, 2, 3])
    weights, d_output = np.array([0.5, 2.0, 1.0], np.float32), np.float32([[1, -2, 3], [4, 5, -6]])
    call = call_of(ids, offsets, weights)
    for module in (small(sparse=True), small()):
        table, cores = dense_table(module.spec, module.cores_of()), module.cores_of()
        (wanted,) = weight_gradients([table], call, [d_output])
        wanted_cores = core_gradients(module.spec, cores, call, d_output)
        actual = module.vjp(ids, offsets, weights)[1](d_output)
        assert_allclose(actual.per_sample_weights, wanted, rtol=1e-4, atol=1e-7)
    assert_close(tuple(actual.cores[0]), wanted_cores, rtol=1e-5, atol=1e-7)
    assert small(sparse=True).vjp(ids, offsets)[1](d_output) is None
