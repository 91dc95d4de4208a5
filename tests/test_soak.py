"""The soak test notices changed losses and growing memory. `make soak` runs it for long."""

import pytest

from rsembed import checkpoint
from tools import soak

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return soak.Soak(tmp_path_factory.mktemp("checkpoints"))


def test_a_run_that_is_thrown_away_repeats_the_losses_of_one_that_is_not(run):
    run.advance()
    run.advance()
    run.save()
    run.advance()
    run.advance()
    run.restore()
    run.advance()
    run.advance()
    run.advance()
    run.save()
    # The newest checkpoint is damaged, so this restores the one before it.
    run.restore()
    assert (run.run.number, run.damaged_step) == (2, 5)
    for what in ("advance", "advance", "advance", "save"):
        getattr(run, what)()
    run.manager.close()
    checkpoint.verify(run.manager.paths()[-1])
    assert (run.twin.number, run.num_repeated, run.num_saves, run.num_restores) == (5, 5, 3, 2)
    assert not run.complaints


def test_a_bit_that_changed_is_heard_of(run):
    run.run.weights *= 1 + 2**-12
    run.advance()
    (complaint,) = run.complaints
    assert complaint.startswith("step 5: loss")


def test_memory_that_grows_is_told_from_memory_that_is_flat(run):
    run.mebibytes = [100.0] * 10 + [200.0] * 10 + [201.0] * 10
    assert 0 < run.growth() < soak.MOST_GROWTH
    run.mebibytes[-10:] = [210.0] * 10
    assert run.growth() > soak.MOST_GROWTH
