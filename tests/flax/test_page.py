"""The programs of docs/flax.md run as printed, and have the results that the page describes."""

import re
from pathlib import Path

import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flax.md"


def test_the_programs_of_the_page_train_freeze_and_save():
    names = {"__name__": "page"}
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) == 7
    for program in programs:
        exec(compile(program, "docs/flax.md", "exec"), names)
        if "as_frozen" in program:
            tables = names["collection"].tables(names["model"].embeddings.state)
            np.testing.assert_array_equal(tables["item"], names["as_frozen"])
    for losses in (names["losses"], names["linen_losses"]):
        assert np.all(np.diff(losses) < 0)
    assert names["steps_made"] == 1
    assert names["rows"].shape == (1_000, 8) and names["probabilities"].shape == (3,)
