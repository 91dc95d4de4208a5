import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.tt import FusedParam, OptimType, TableBatchedTTEmbeddingBag, TTEmbeddingBag
from tests.tbe import row_formulas
from tests.tt.tt_oracles import CASES, dense_table, pooled, step, worked_cores

PAGE_IDS, PAGE_OFFSETS = [1, 2, 4, 5, 4, 3, 2, 9], [0, 4]


def small(**options):
    return TTEmbeddingBag(
        10, 3, tt_ranks=[2, 2], **{"sparse": False, "use_cache": False, **options}
    )


def values(module):
    return [np.asarray(core) for core in module.cores_of()]


def worked(name, **options):
    given = CASES[name]["input"]
    emb = TTEmbeddingBag(24, 8, given["ranks"], given["p"], given["q"], **options)
    emb.set_cores(worked_cores(given, emb.spec))
    return emb, given, CASES[name]["expect"]


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
    assert [core.shape for core in values(emb)] == [(120, 48), (90, 12 * 4 * 14), (110, 56)]
    output = emb(jnp.asarray([999_999, 0]), jnp.asarray([0, 1]))
    assert output.shape == (2, 64)
    embedding_sum = TTEmbeddingBag(10, 3, None, None, tt_ranks=[2, 2], sparse=False)
    output = embedding_sum(jnp.asarray(PAGE_IDS), jnp.asarray(PAGE_OFFSETS))
    table = dense_table(embedding_sum.spec, values(embedding_sum))
    assert_allclose(output, pooled(table, PAGE_IDS, [0, 4, 8]), rtol=1e-5, atol=1e-6)
    assert_array_equal(
        output, embedding_sum(jnp.asarray(PAGE_IDS), jnp.asarray([0, 4, 8]), warmup=False)
    )


def test_arguments_by_position():
    one = TTEmbeddingBag(10, 3, [2, 4], [2, 5, 1], [1, 3, 1])
    assert (one.spec.tt_ranks, one.spec.tt_p_shapes, one.spec.tt_q_shapes) == (
        (2, 4),
        (2, 5, 1),
        (1, 3, 1),
    )
    assert TTEmbeddingBag(10, 3, [2, 5, 1], [1, 3, 1], tt_ranks=[2, 4]).spec == one.spec
    emb = TTEmbeddingBag(
        10,
        3,
        [2],
        [5, 2],
        [1, 3],
        OptimType.EXACT_ADAGRAD,
        0.3,
        1e-6,
        True,
        False,
        0,
        0,
        "uniform",
        True,
    )
    assert (emb.optimizer, emb.eps, emb.sparse, emb.use_cache) == (
        OptimType.EXACT_ADAGRAD,
        1e-6,
        True,
        False,
    )
    assert (
        float(emb.learning_rate.get_value()) == pytest.approx(0.3) and emb.weight_dist == "uniform"
    )
    assert (
        TTEmbeddingBag(10, 3, [5, 2], [1, 3], OptimType.ADAM, tt_ranks=[2]).optimizer
        is OptimType.ADAM
    )
    batched = TableBatchedTTEmbeddingBag(
        2, 10, 3, [2], [5, 2], [1, 3], OptimType.SGD, 0.3, 1e-6, False
    )
    assert batched.num_tables == 2 and not batched.sparse and not batched.use_cache


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_every_form_of_input_is_the_same_batch(mode):
    emb = small(mode=mode)
    rows, weights = [[1, 2, 4], [], [9]], [[0.5, 2.0, -1.0], [], [3.0]]
    flat, flat_weights = jnp.asarray([1, 2, 4, 9]), jnp.asarray([0.5, 2.0, -1.0, 3.0])
    dense = np.asarray([[1, 2, 4], [-1, -1, -1], [9, -1, -1]])
    dense_weights = np.asarray([[0.5, 2, -1], [0, 0, 0], [3, 0, 0]], np.float32)
    wanted = pooled(
        dense_table(emb.spec, values(emb)),
        [1, 2, 4, 9],
        [0, 3, 3, 4],
        np.asarray(flat_weights),
        mode,
    )
    for found in (
        emb(flat, jnp.asarray([0, 3, 3, 4]), flat_weights),
        emb(flat, np.asarray([0, 3, 3]), flat_weights),
        emb(dense, None, dense_weights),
        emb(jnp.asarray(dense), per_sample_weights=jnp.asarray(dense_weights)),
        emb(rows, per_sample_weights=weights),
        emb(Bags.from_lists(rows, weights)),
        emb(Bags.from_lists(rows, weights).pad_to(9)),
    ):
        assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_last_offset_can_be_said_to_start_an_empty_bag():
    assert small()(jnp.asarray([1, 2]), jnp.asarray([0, 1, 2])).shape == (2, 3)
    assert small(include_last_offset=False)(jnp.asarray([1, 2]), jnp.asarray([0, 1, 2])).shape == (
        3,
        3,
    )
    emb = small(include_last_offset=True)
    assert nnx.jit(lambda m, i, o: m(i, o))(
        emb, jnp.asarray([1, 2]), jnp.asarray([0, 1, 2])
    ).shape == (2, 3)
    with pytest.raises(ValueError, match="pass include_last_offset=True or False"):
        nnx.jit(lambda m, i, o: m(i, o))(small(), jnp.asarray([1, 2]), jnp.asarray([0, 1, 2]))


def test_sparse_false_returns_gradients_and_changes_nothing():
    emb, given, expect = worked("grad_dense_3core", sparse=False)
    before = values(emb)
    bags = Bags(np.asarray(given["indices"]), np.asarray(given["offsets"]))
    d_output = np.asarray(given["d_output"], np.float32)
    output, gradients = step(emb, d_output, bags)
    assert_array_equal(output, CASES["bag_sum_empty_dup"]["expect"]["output"])
    for found, wanted in zip(gradients.cores[0], expect["d_cores"], strict=True):
        assert_array_equal(found, np.asarray(wanted).reshape(found.shape))
    assert all((a == b).all() for a, b in zip(before, values(emb), strict=True))


@pytest.mark.slow_rows("EXACT_ADAGRAD-adagrad-states1-0.001")
@pytest.mark.parametrize(
    ("name", "formula", "states", "eps"),
    [
        ("SGD", row_formulas.sgd, [], 1e-3),
        ("EXACT_ADAGRAD", row_formulas.adagrad, ["momentum1"], 1e-3),
        ("EXACT_ROWWISE_ADAGRAD", row_formulas.rowwise_adagrad, ["momentum1"], 1e-3),
        (
            "ADAM",
            row_formulas.adam,
            ["momentum1", "momentum2"],
            1e-8,
        ),  # of its own, whatever is given
    ],
)
def test_fused_rules_are_their_formulas_on_whole_cores(name, formula, states, eps):
    options = dict(learning_rate=row_formulas.LR, eps=1e-3)
    emb, given, _ = worked("fused_sgd", sparse=True, optimizer=OptimType[name], **options)
    twin, _, _ = worked("fused_sgd", sparse=False)
    bags = Bags(np.asarray(given["indices"]), np.asarray(given["offsets"]))
    wanted = [np.float64(core) for core in values(emb)]
    kept = [[dict.fromkeys(states, 0.0) for _ in core] for core in wanted]
    for number, scale in enumerate((1.0, -0.5)):
        d_output = scale * np.asarray(given["d_output"], np.float32)
        twin.set_cores(emb.cores_of())
        gradients = [np.float64(g) for g in step(twin, d_output, bags)[1].cores[0]]
        step(emb, d_output, bags)
        for t, gradient in enumerate(gradients):
            rows = zip(wanted[t], gradient, kept[t], strict=True)
            wanted[t] = np.stack(
                [formula(*row, number + 1, row_formulas.DEFAULTS | {"eps": eps}) for row in rows]
            )
    for found, core in zip(values(emb), wanted, strict=True):
        assert_allclose(found, core, rtol=2e-5, atol=2e-6)


def test_a_new_learning_rate_compiles_nothing():
    emb, ids, num_traces = small(sparse=True), jnp.asarray([[1, 2], [3, -1]]), 0

    @nnx.jit
    def counted_step(emb):
        nonlocal num_traces
        num_traces += 1
        emb.vjp(ids)[1](jnp.ones((2, 3)))

    moved = []
    for rate in (0.5, 0.0):
        emb.set_learning_rate(rate)
        before = values(emb)
        counted_step(emb)
        moved.append(any((a != b).any() for a, b in zip(before, values(emb), strict=True)))
    assert (moved, num_traces) == ([True, False], 1)


def test_optax_trains_the_cores_of_sparse_false_through_nnx_and_sees_no_others():
    emb, fused = small(), small(sparse=True)
    assert [len(jax.tree.leaves(nnx.state(fused, kind))) for kind in (nnx.Param, FusedParam)] == [
        0,
        3,
    ]
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
    jax.tree.map(
        lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, nnx.state(module)
    )
    for call in (lambda: module(ids), lambda: module.vjp(ids), module.full_weight):
        with pytest.raises(
            RuntimeError, match=r"TTEmbeddingBag has lost its cores .* Ctrl-C .* nnx.update"
        ):
            call()
    nnx.update(module, saved)
    assert_array_equal(module(ids), before)


def test_get_params_and_reset_parameters():
    emb = small(sparse=True, optimizer=OptimType.EXACT_ADAGRAD)
    assert len(emb.get_params()) == len(emb.get_params()) == 3
    cached = small(sparse=True, use_cache=True, cache_size=4)
    assert [own.shape for own in cached.get_params()[3:]] == [(4, 3)]
    first = values(emb)
    step(emb, np.ones((1, 3), np.float32), np.asarray([[1, 2]]))
    emb.reset_parameters(rngs=nnx.Rngs(0))
    assert all((a == b).all() for a, b in zip(first, values(emb), strict=True))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(emb.slots[0].get_value()))
    emb.reset_parameters("uniform")
    assert not any((a == b).any() for a, b in zip(first, values(emb), strict=True))


def test_gradients_of_weights_are_returned_by_fused_steps_too():
    fused, plain = (
        TTEmbeddingBag(60, 8, tt_ranks=[3, 2], use_cache=False, sparse=sparse)
        for sparse in (True, False)
    )
    arguments = np.array([5, 9, 5]), np.array([0, 2]), np.array([0.5, 2.0, 1.0], np.float32)
    d_output = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    wanted = np.sum(dense_table(plain.spec, values(plain))[[5, 9, 5]] * d_output[[0, 0, 1]], axis=1)
    for module in (fused, plain):
        found = module.vjp(*arguments)[1](d_output)
        assert_allclose(found.per_sample_weights, wanted, rtol=1e-4, atol=1e-7)
    assert found.cores and fused.vjp(*arguments[:2])[1](d_output) is None
