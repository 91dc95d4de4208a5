"""The tutorial's training loop gives the same losses wherever it runs."""

import functools
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests import launching
from tests.sparsecore import minibatch_program
from tests.sparsecore import tutorial_program as tutorial

LOSS_TOLERANCE = 1e-4
"""Sums over devices are added in another order; after eight steps that shows in the seventh digit."""


@functools.cache
def losses(num_devices: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return tutorial.train(
            tutorial.make_batch(tutorial.synthetic_text()),
            num_devices=num_devices,
            num_steps=tutorial.NUM_STEPS,
            fdo_folder=folder,
        )


def test_training_lowers_the_loss():
    assert losses(1)[-1] < 0.98 * losses(1)[0]
    assert losses(1)[0] == pytest.approx(np.log(tutorial.VOCABULARY), rel=0.01)


def test_losses_do_not_depend_on_the_number_of_devices():
    np.testing.assert_allclose(losses(4), losses(1), atol=LOSS_TOLERANCE, rtol=0)


def test_processes_agree_and_compute_what_one_process_does(tmp_path):
    printed = launching.printed(launching.start(Path(tutorial.__file__), tmp_path))
    outputs = re.findall(r"^\[\d\] (\[\[.*)", printed, re.MULTILINE)
    assert len(outputs) == 2, printed
    wanted, _ = minibatch_program.run_step(4, minibatch_program.TIGHT, enable_minibatching=True)
    assert wanted[0][0] > 1
    for output in outputs:
        found, *stepped = json.loads(output)
        np.testing.assert_allclose(found, losses(4), atol=LOSS_TOLERANCE, rtol=0)
        for got, array in zip(stepped, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got, array.dtype), array)
