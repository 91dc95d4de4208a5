"""Two processes with two devices each learn the same as one process."""

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed import checkpoint
from tests import launching
from tests.sok import training
from tests.world import assert_close


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The output of the program in two processes, and the path of the checkpoint that it writes."""
    folder = tmp_path_factory.mktemp("launched") / "learned"
    run = launching.start(Path(__file__).with_name("seams_program.py"), folder)
    output = launching.printed(run)
    assert run.returncode == 0, output
    return output, folder


def test_processes_agree_on_shapes_or_refuse_together(launched):
    printed, _ = launched
    assert "[0] all agreed" in printed and "[1] all agreed" in printed
    # This is the output of the program in docs/sok.md.
    assert all(f"[{process}] (64, 2, 16) 384\n" in printed for process in (0, 1))


def test_processes_learn_what_one_device_learns(launched):
    _, folder = launched
    tree = checkpoint.load(folder).tree
    expected = training.train(training.context(1))
    assert_close(tree, expected, rtol=1e-5, atol=1e-6)
    lazy, adam = expected["layers"]["lazy"], expected["layers"]["adam"]
    for name in ("lazy", "adam"):
        assert_array_equal(tree["layers"][name]["keys"], adam["keys"])
    assert len(adam["keys"]) > 10
    # Adam also moves rows that are not in the batch.
    assert not np.allclose(lazy["values"], adam["values"], atol=1e-3)
