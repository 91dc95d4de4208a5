"""The tutorial's training loop has the same losses on one device and in several processes."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import launching
from tests.sparsecore import minibatch_program, tutorial_program as tutorial

LOSS_TOLERANCE = 1e-4
"""Tolerance of losses. Several devices add in another order, which changes the last digits."""


@pytest.mark.slow
def test_two_processes_of_two_devices_lower_the_loss_as_one_device_does(tmp_path):
    run = launching.start(Path(tutorial.__file__), tmp_path / "several")
    batch = tutorial.make_batch(tutorial.synthetic_text())
    losses = tutorial.train(batch, tmp_path / "one", num_devices=1, num_steps=tutorial.NUM_STEPS)
    assert losses[0] == pytest.approx(np.log(tutorial.VOCABULARY), rel=0.01)
    assert losses[-1] < 0.98 * losses[0]
    printed = launching.printed(run)
    outputs = re.findall(r"^\[\d\] (\[\[.*)", printed, re.MULTILINE)
    assert len(outputs) == 2, printed
    wanted, _ = minibatch_program.run_step(4, minibatch_program.TIGHT, enable_minibatching=True)
    assert wanted[0][0] > 1
    for output in outputs:
        actual, *stepped = json.loads(output)
        np.testing.assert_allclose(actual, losses, atol=LOSS_TOLERANCE, rtol=0)
        for got, array in zip(stepped, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got, array.dtype), array)


PUBLISHED = Path(os.environ.get("RSEMBED_PUBLISHED_TUTORIAL", "sparsecore_shakespeare_flax.txt"))
"""The published page as plain text without indentation, with code, prose and outputs.

This repository does not have the text."""
SHA256 = "53628c8f654d647f5c39845b714640e034207b819a2424663294990513af068d"
CODE = """
12-68 0
74-85 0
102-121 0
122-122 1
157-158 0
159-168 1
169-186 2
187-188 1
189-204 2
205-213 0
216-224 0
225-258 1
259-274 0
281-290 0
291-292 1
293-324 0
332-352 0
353-353 1
354-358 2
359-366 1
377-380 0
384-388 0
389-422 1
423-427 2
428-428 1
429-434 2
435-437 0
"""
"""First and last line of each piece of the program, and its depth of indentation."""
PRINTED = [*range(275, 279), *range(325, 329), 439]
"""Line numbers of outputs on the page that each run prints, too."""
FOLDER_LINE = 41
"""Number of the line with the folder of the statistics. All users of a machine would share it."""


@pytest.mark.slow
def test_the_published_text_itself_runs_unchanged(tmp_path):
    if not PUBLISHED.is_file():
        pytest.skip(
            "needs the published tutorial's text, which is not in this repository, in the file that "
            "RSEMBED_PUBLISHED_TUTORIAL names"
        )
    content = PUBLISHED.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256, (
        "the file is another edition than that of the line numbers in CODE"
    )
    lines = content.decode().splitlines()
    name, _, _ = lines[FOLDER_LINE - 1].partition(" = ")
    lines[FOLDER_LINE - 1] = f"{name} = {str(tmp_path)!r}"
    program = []
    for piece in CODE.split("\n")[1:-1]:
        first, last, num_blocks = map(int, piece.replace("-", " ").split())
        for line in lines[first - 1 : last]:
            program.append("    " * num_blocks + line)
    (tmp_path / "tutorial.py").write_text("\n".join(program) + "\n")
    # The published limits of 64 ids are for the 32 shards of 8 devices.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "rsembed.sparsecore", "tutorial.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [lines[number - 1] for number in PRINTED if lines[number - 1] not in printed] == []
    (loss,) = re.findall(r"^test_loss = (.*)$", done.stdout, re.MULTILINE)
    # The page has 0.0079, for another text. A uniform guess has log(2048) = 7.6.
    assert float(loss) < 0.1
    assert len([*(tmp_path / "fdo_dump").iterdir()]) > 0
