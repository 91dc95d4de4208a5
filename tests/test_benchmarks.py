"""The contestants of each timing script do the same work. The workloads are too small to time."""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import rsembed as rs
from tests.world import assert_same

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="timing scripts come with a checkout"),
]


@pytest.fixture(autouse=True, scope="module")
def scripts():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def workload(scripts):
    import timing

    return timing.Workload(
        name="tiny",
        num_tables=2,
        vocabulary_size=50,
        embedding_dim=8,
        batch_size=16,
        ids_per_sample=3,
    )


def test_ours_and_plain_jax_train_the_same_tables(workload):
    import lookup
    import timing

    ids = timing.draw_ids(workload, "zipf", seed=3)
    ours, plain = lookup.rsembed_contestant(workload, ids), lookup.xla_contestant(workload, ids)
    for runs in (ours, plain):
        for k, what in enumerate(("step, SGD", "step, Adagrad", "step, SGD")):
            runs[what](k)
    pairs = zip(ours["lookup"](5).values(), plain["lookup"](5), strict=True)
    for of_ours, of_plain in pairs:
        assert_allclose(of_ours, of_plain, rtol=1e-5, atol=1e-6)


def test_table_batched_contestants_agree_after_two_steps(workload):
    import tbe

    contestants = tbe.our_contestants(
        workload, tbe.draw_batches(workload, "uniform"), "EXACT_ROWWISE_ADAGRAD"
    )
    outputs = tbe.outputs_after_two_steps(contestants)
    assert len(outputs) == 2
    tbe.check_agreement(outputs, "EXACT_ROWWISE_ADAGRAD")


@pytest.fixture
def ragged(scripts, monkeypatch):
    import ragged

    small = {"NUM_TABLES": 3, "ROWS": 50, "DIM": 8, "NUM_SPLIT_TABLES": 2, "NUM_SPLIT_SAMPLES": 8}
    for name, value in {**small, "LONG_BAG": 100}.items():
        monkeypatch.setattr(ragged, name, value)
    return ragged


# Imports of torch and FBGEMM warn.
@pytest.mark.filterwarnings("ignore")
def test_ragged_contestants_prepare_one_batch_and_are_all_timed(ragged):
    batches = ragged.draw_batches(6, 3)
    runs = ragged.our_contestants(batches)
    expected = runs["bags"](1)
    for form in ("lists", "jagged"):
        assert_same(runs[form](1), expected)
    assert [expected[name].to_lists() for name in expected] == list(
        ragged.as_lists(batches[1]).values()
    )
    record = ragged.measure(6, 3, 1)
    for name in ("step", "bags", "lists", "jagged", "jagged, step"):
        assert 0 < record[name]["best"] <= record[name]["median"] < np.inf
    assert len(ragged.cells_of(record)) == len(ragged.HEADS)
    assert ragged.num_programs(ragged.Model(3), batches) <= 3


def test_ragged_batches_on_devices_are_counted_and_timed(ragged):
    record = ragged.measure_devices(1)
    assert 1 <= record["programs"] <= 16 and 0 < record["ids a place"] <= 1
    assert 0 < record["step"]["best"] < np.inf and 0 < record["long"]["best"] < np.inf
    batch = {"a": rs.Bags(np.zeros(8, np.int32), np.arange(3)), "b": np.ones((2, 4), np.int32)}
    assert ragged.ids_a_place(batch, 12) == 12 / 16


def test_contestants_of_serving_look_up_the_same_vectors(scripts, monkeypatch):
    import serving

    monkeypatch.setattr(serving, "ROWS", 50)
    expected, *others = [
        run(1) for run in serving.our_contestants(serving.draw_batches(3)).values()
    ]
    for vectors in others:
        assert_same(vectors, expected)


def test_every_wing_whose_compiling_is_timed_trains(scripts, monkeypatch):
    # The script changes XLA_FLAGS when it is imported. Pytest restores the variable after the test.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    import compiling

    for name in ("core, dense", "SparseCore", "table-batched", "model-parallel, hashed"):
        step = compiling.WINGS[name](1)
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(step()) if leaf.dtype == np.float32]
        after = [np.asarray(leaf) for leaf in jax.tree.leaves(step()) if leaf.dtype == np.float32]
        assert any((one != other).any() for one, other in zip(before, after, strict=True)), name


def test_tables_made_small_are_as_small_as_they_say_and_learn(scripts, monkeypatch, tmp_path):
    import smaller

    monkeypatch.setattr(smaller, "RATIOS", (10,))
    monkeypatch.setattr(smaller, "RATES", (0.006,))
    monkeypatch.setattr(smaller, "BATCH", 128)
    monkeypatch.setitem(
        smaller.LOGS, "clicks", lambda seed: smaller.clicks(seed, num_samples=6_000)
    )
    # optax needs standard dtype promotion.
    with jax.numpy_dtype_promotion("standard"):
        records = list(smaller.study(["clicks"], 1))
    smaller.draw(records, "a machine", tmp_path / "picture.png")
    assert [record["method"] for record in records] == ["dense", *smaller.METHODS]
    dense, *others, int8 = records
    assert dense["bytes"] == 4 * 16 * 120_000 and all(
        record["bytes"] <= dense["bytes"] / 10 for record in others
    )
    assert int8["bytes"] == (16 + 4) * 120_000
    np.testing.assert_allclose(int8["loss"], dense["loss"], atol=1e-3)
    assert all(record["AUC"] > 0.55 and record["loss"] < 0.7 for record in records)


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order(scripts):
    import smaller

    scores, labels = np.array([0.1, 0.7, 0.3, 0.9, 0.2]), np.array([0, 1, 1, 0, 0])
    in_order = scores[labels == 1][:, None] > scores[labels == 0]
    assert smaller.area_under_curve(scores, labels) == in_order.mean()


def test_the_trial_of_faults_tells_older_checkpoints_from_wrong_ones(scripts, monkeypatch):
    import faults

    class Blind(faults.Rsembed):
        """Always returns the same tree, and never reads a checkpoint."""

        def restore(self):
            return faults.tree_of(0)

    monkeypatch.setattr(faults, "SHAPE", (2000, 4))
    monkeypatch.setitem(faults.SUBJECTS, "blind", Blind)
    in_files = (faults.flipped_bit, faults.cut_file, faults.missing_file, faults.swapped_files)
    outcomes = faults.measured(1, ["rsembed", "blind"], in_files)
    for fault in in_files:
        assert outcomes[fault.__name__, "rsembed"] == {"older": 1}
        assert outcomes[fault.__name__, "blind"] == {"WRONG": 1}


# The import of FBGEMM warns.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_everybody_on_a_gpu_would_train_the_same_tables(scripts, monkeypatch):
    import gpu

    # The contestant of plain XLA has no row-wise Adagrad.
    monkeypatch.delitem(gpu.RULES, "row-wise Adagrad")
    records = list(gpu.measure("C", gpu.cases(tiny=True)["C"], 1, bandwidth=1e9))
    assert {"ours", "reference", "XLA"} <= {record["who"] for record in records}
    assert not [record for record in records if "error" in record]
    for record in records:
        assert 0 < record["best_milliseconds"] <= record["milliseconds"] < np.inf
    with pytest.raises(AssertionError, match=r"ours and the reference differ by 1\.0e-01"):
        gpu.check_agreement(np.full((2, 2), 1.1), np.ones((2, 2)), "ours")


def test_models_lose_alike_however_their_tables_are_kept(scripts):
    import dlrm

    sizes = dlrm.table_sizes(0.001)
    batches = dlrm.draw_batches(sizes, 16)
    makers = (dlrm.core_contestant, dlrm.nnx_contestant, dlrm.table_batched_contestant)
    with jax.numpy_rank_promotion("allow"):
        core, *others = (
            [float(run(k)) for k in range(4)] for run in (make(sizes, batches) for make in makers)
        )
    assert len(set(core)) == 4
    for losses in others:
        assert_allclose(losses, core, rtol=1e-5)


@pytest.fixture
def results(scripts, monkeypatch):
    import results

    yield results
    for name in ("movielens", "training", "criteo"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("num_before", [0, 2, 3])
def test_the_counter_of_letters_has_the_loss_of_a_loop(results, num_before):
    codes = np.random.default_rng(0).integers(0, 4, 120) ** 2 // 3  # 0, 1, 3: 2 never occurs
    num_train = 100
    losses = []
    for place in range(num_train, len(codes)):
        probability = 1 / (codes.max() + 1)
        for length in range(num_before + 1):
            followers = []
            for other in range(length, num_train):
                if (codes[other - length : other] == codes[place - length : place]).all():
                    followers.append(codes[other])
            if followers:
                num_distinct = len(set(followers))
                count = followers.count(codes[place]) + num_distinct * probability
                probability = count / (len(followers) + num_distinct)
        losses.append(-np.log(probability))
    assert_allclose(results.counter_loss(codes, num_train, num_before), np.mean(losses), rtol=1e-12)


def test_the_page_of_results_comes_from_one_command_and_says_first_what_is_worse(
    results, monkeypatch, tmp_path
):
    import smaller

    folder = tmp_path / "made-up"
    folder.mkdir()
    films = [f"{film},Film {film} (1995),Drama" for film in range(60)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]) + "\n")
    lines = ["userId,movieId,rating,timestamp"]
    generator = np.random.default_rng(0)
    for user in range(30):
        for order, film in enumerate(generator.permutation(60)[:20]):
            lines.append(f"{user},{film},4,{900_000_000 + 1_000 * user + order}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(results, "EPOCHS", 1)
    monkeypatch.setattr(results, "NEIGHBOURS", (5, 10))
    monkeypatch.setattr(results, "FACTORS", ((1.0, 10.0),))
    monkeypatch.setattr(results.script("training"), "BATCH_SIZE", 128)
    monkeypatch.setattr(smaller, "RATIOS", (10,))
    monkeypatch.setattr(smaller, "RATES", (0.006,))
    monkeypatch.setattr(smaller, "METHODS", ("hashed", "int8"))
    monkeypatch.setattr(smaller, "BATCH", 64)
    store, page = tmp_path / "results.json", tmp_path / "results.md"
    arguments = ["--ratings", str(folder), "--seeds", "1", "--click-rows", "0"]
    arguments += ["--json", str(store), "--page", str(page)]
    # optax needs standard dtype promotion.
    with jax.numpy_dtype_promotion("standard"):
        assert results.main(arguments) == 0
    text = page.read_text()
    assert "600 ratings of 60 films by 30 users" in text
    for who in ("popularity", "item-kNN", "ALS", "two towers", "self-attention", "int8", "hashed"):
        assert f"| {who} | " in text
    # The second run must read all records from the file, and must not compute them again.
    monkeypatch.setattr(results, "task_of", None)
    results.main(arguments)
    assert page.read_text() == text

    records = [{"who": "two towers", "recall": 0.1}, {"who": "two towers", "recall": 0.3}]
    records.append({"who": "ALS", "recall": 0.25})
    worse = results.better_peers(records, ("two towers",), "recall")
    assert worse == ["two towers has recall@10 0.200, ALS has 0.250"]
    assert results.better_peers(records, ("ALS",), "recall") == []
    assert text.index("## Where we are worse than a peer") < text.index("## Films: made-up")


def test_the_committed_page_of_results_is_that_of_the_committed_records(results, tmp_path):
    page = tmp_path / "results.md"
    results.main(["--click-rows", "0", "--page", str(page)])
    assert page.read_text() == (BENCHMARKS.parent / "docs" / "results.md").read_text()
