import numpy as np
import pytest

from rsembed import plot


def test_work_of_a_lookup_is_counted_by_hand():
    work = plot.lookup_work(num_ids=6, num_distinct_rows=4, num_bags=2, dim=8, value_bytes=2)
    assert work.flops == 6 * 8 * 2
    assert work.num_bytes == 4 * 8 * 2 + 6 * 4 + 2 * 8 * 4


def test_the_roof_has_its_ridge_where_memory_and_arithmetic_meet():
    np.testing.assert_allclose(plot.roof([0.5, 2.0, 10.0], 1e9, 4e9), [0.5e9, 2e9, 4e9])


def test_programs_stand_at_the_speed_they_reached():
    work = plot.Work(flops=2e9, num_bytes=4e9)
    ax = plot.plot_roofline(work, {"slow": 2.0, "fast": 0.5}, bytes_per_second=1e10, flops_per_second=1e11)
    points = {line.get_label(): line.get_xydata()[0] for line in ax.lines if line.get_linestyle() == "None"}
    assert points == {
        "slow: 20 % of the roof": pytest.approx([0.5, 1.0]),
        "fast: 80 % of the roof": pytest.approx([0.5, 4.0]),
    }
    roof = ax.lines[0].get_xydata()
    assert roof[:, 1].max() == pytest.approx(100.0) and (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
