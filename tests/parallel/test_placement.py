"""The planner keeps within memory, finds what trying everything finds, and says why."""

import itertools

import numpy as np
import pytest

import rsembed as rs
from rsembed.parallel import DeviceLoad, Hardware, PlacementError, plan_placement, step_time, zipf_ids
from rsembed.tt import TensorTrain

ADAGRAD = rs.AdagradOptimizerSpec(0.1)


def feature(name, rows, dim, ids_per_sample, *, table=None, optimizer=ADAGRAD, batch=8192, **options):
    table = table or rs.TableSpec(name=name, vocabulary_size=rows, embedding_dim=dim, optimizer=optimizer, **options)
    return rs.FeatureSpec(name=f"f_{name}", table_spec=table, input_shape=(batch, ids_per_sample))


def test_memory_and_traffic_of_every_choice():
    wide = feature("wide", 1000, 64, 5)
    again = feature("again", 1000, 64, 2, table=wide.table_spec)
    choices = {
        choice.placement: choice for choice in plan_placement([wide, again], num_devices=8).table("wide").choices
    }
    row = 64 * 4 * 2  # the table, and Adagrad's accumulator beside it
    memory = {name: choice.memory_bytes for name, choice in choices.items()}
    assert memory == {
        "row_wise": 125 * row,
        "table_wise": 1000 * row,
        "column_wise": 125 * row,
        "replicated": 1000 * row,
    }
    distinct = zipf_ids(1000, 1.05).expected_distinct(1024 * 7)
    sent = {
        "row_wise": 7 / 8 * 1.25 * distinct * (4 + 2 * 64 * 4),
        "table_wise": 7 / 8 * (1024 * 7 * 4 + 2 * 2048 * 64 * 4),
        "column_wise": 7 * 1024 * 7 * 4 + 2 * 7 / 8 * 2048 * 64 * 4,
        "replicated": 2 * 7 / 8 * 1000 * 64 * 4,
    }
    assert {name: choice.sent_bytes for name, choice in choices.items()} == pytest.approx(sent)


def test_observed_ids_replace_the_assumption():
    one = feature("t", 1000, 8, 4)
    counts = np.zeros(1000)
    counts[:3] = 5
    plan = plan_placement(one, num_devices=8, id_counts={"t": counts}, placements={"t": "row_wise"}, padding=1.0)
    assert plan.table("t").choice.sent_bytes == pytest.approx(7 / 8 * 3 * (4 + 2 * 8 * 4))


@pytest.mark.parametrize(("placement", "path"), [("table_wise", "table_wise"), ("row_wise", "dedup")])
def test_a_balanced_plan_takes_as_long_as_the_model_says(placement, path):
    features = [feature(f"t{number}", 100_000, 64, 20) for number in range(16)]
    plan = plan_placement(features, num_devices=8, placements=dict.fromkeys([f"t{n}" for n in range(16)], placement))
    one = zipf_ids(100_000, 1.05).expected_distinct(1024 * 20)
    load = DeviceLoad(
        num_ids=16 * 1024 * 20,
        num_outputs=16 * 1024,
        num_distinct_ids=16 * one,
        num_rows=1,
        embedding_dim=64,
        key_bytes=4,
    )
    assert plan.step_seconds == pytest.approx(step_time(path, load, 8, Hardware()))
    owners = [table.device for table in plan.tables]
    assert owners == [None] * 16 if placement == "row_wise" else sorted(owners) == sorted([*range(8)] * 2)


def seconds_of(plan, assignment, num_devices):
    """Step time of any assignment `[(choice, device)]`, or infinity where it does not fit: plain loops."""
    seconds, memory, kinds = [0.0] * num_devices, [0.0] * num_devices, set()
    for choice, owner in assignment:
        kinds.add(choice.placement)
        for device in range(num_devices):
            if owner is None:
                seconds[device] += choice.seconds
                memory[device] += choice.memory_bytes
            elif owner == device:
                seconds[device] += num_devices * choice.seconds
                memory[device] += choice.memory_bytes
    waits = sum(2 if kind == "replicated" else 3 for kind in kinds)
    too_full = max(memory) > plan.hardware.memory_bytes
    return np.inf if too_full else max(seconds) + waits * plan.hardware.intra_node_latency_seconds


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_far_from_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    sizes = [(int(10 ** rng.uniform(2, 6)), int(rng.choice([16, 64, 128])), int(rng.choice([1, 20]))) for _ in range(4)]
    features = [feature(f"t{number}", *size, batch=16_384) for number, size in enumerate(sizes)]
    least = sum(rows * dim * 8 for rows, dim, _ in sizes) / 2
    hardware = Hardware(memory_bytes=least * rng.uniform(1.05, 2.5), intra_node_latency_seconds=2e-6)
    plan = plan_placement(features, num_devices=2, hardware=hardware)
    own = [(table.choice, table.device) for table in plan.tables]
    assert (
        plan.step_seconds == pytest.approx(seconds_of(plan, own, 2)) and max(plan.memory_bytes) <= hardware.memory_bytes
    )
    options = [
        [
            (choice, device)
            for choice in table.choices
            for device in ([0, 1] if choice.placement == "table_wise" else [None])
        ]
        for table in plan.tables
    ]
    best = min(seconds_of(plan, assignment, 2) for assignment in itertools.product(*options))
    assert best <= plan.step_seconds * (1 + 1e-9) <= 1.05 * best


def test_the_plan_prints_every_choice_and_its_reason():
    features = [
        feature("hist", 10_000_000, 64, 20),
        feature("word", 1_000_000, 64, 50, optimizer=rs.RowWiseAdagradOptimizerSpec(0.1)),
    ]
    plan = plan_placement(features, num_devices=8, hardware=Hardware(memory_bytes=2e9), placements={"word": "row_wise"})
    text = str(plan)
    assert "2 tables on 8 devices: fullest 0.67 of 2.00 GB" in text
    assert "word: row_wise, as asked for" in text
    assert "hist: row_wise, because table_wise needs 5.12 GB, where 1.97 GB are free" in text
    assert "* row_wise " in text and "  column_wise " in text
    roomy = plan_placement(features, num_devices=8)
    assert "hist: row_wise, because as table_wise its owner would hold up the others" in str(roomy)
    # A rule that looks at whole rows cannot have its columns apart.
    assert [choice.placement for choice in roomy.table("word").choices if choice.placement == "column_wise"] == []


def test_tables_that_fill_the_budget_to_the_last_byte_fit():
    features = [feature(f"t{number}", 1001 * (number + 1), 8, 3, batch=7 * 99) for number in range(5)]
    full = max(plan_placement(features, num_devices=7, placements={f"t{n}": "row_wise" for n in range(5)}).memory_bytes)
    plan = plan_placement(features, num_devices=7, hardware=Hardware(memory_bytes=full))
    assert max(plan.memory_bytes) == pytest.approx(full)
    with pytest.raises(PlacementError):
        plan_placement(features, num_devices=7, hardware=Hardware(memory_bytes=full - 1))


def test_a_table_beyond_the_budget_is_named():
    features = [feature("small", 1000, 8, 1), feature("large", 10_000_000, 64, 1)]
    with pytest.raises(
        PlacementError, match=r"'large' does not fit: row_wise it needs 0\.640 GB on each of 8 .*0\.500 GB"
    ):
        plan_placement(features, num_devices=8, hardware=Hardware(memory_bytes=0.5e9))
    with pytest.raises(PlacementError, match=r"'large' does not fit: table_wise it needs 5\.120 GB on one device"):
        plan_placement(features, num_devices=8, hardware=Hardware(memory_bytes=2e9), placements={"large": "table_wise"})


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: feature("t", 9, 8, 1), {"placements": {"u": "row_wise"}}, ValueError, "'u' -> 'row_wise': tables are"),
        (
            lambda: feature("t", 9, 8, 1),
            {"placements": {"t": "rows"}},
            ValueError,
            "'t' -> 'rows': .*'row_wise', 'table",
        ),
        (lambda: feature("t", 9, 8, 1, batch=9), {}, ValueError, r"'f_t': input_shape is \(9, 1\).* 8 devices"),
        (
            lambda: feature("t", 9, 8, 1),
            {"id_counts": {"t": np.ones(8)}},
            ValueError,
            "'t' has 9 rows, its counts shape",
        ),
        (
            lambda: feature("t", 9, 8, 1, storage=TensorTrain((2,))),
            {},
            NotImplementedError,
            "'t' is kept as TensorTrain",
        ),
        (
            lambda: feature("t", 9, 6, 1),
            {"placements": {"t": "column_wise"}},
            NotImplementedError,
            "'t': 6 columns with",
        ),
    ],
)
def test_what_cannot_be_planned(make, options, error, message):
    with pytest.raises(error, match=message):
        plan_placement(make(), num_devices=8, **options)
