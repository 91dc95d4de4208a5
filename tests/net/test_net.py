"""Short runs of every wing give the recorded numbers, and on a recorded platform the same bits."""

import json
import os

import numpy as np
import pytest

from tests.net import runs

IS_RECORDING = os.environ.get("RSEMBED_RECORD_NET") == "1"
EXPECTED, BITS = {}, {}
if runs.RECORD.exists():
    with np.load(runs.RECORD) as record:
        EXPECTED = {name: record[name] for name in record.files if name != "bits"}
        BITS = json.loads(str(record["bits"]))
found_now = {}


@pytest.mark.slow_rows(
    "tensor train cached",
    "sparsecore 2x2 bfloat16",
    "sparsecore 4x1 adam",
    "model-parallel 2 admission",
    "model-parallel 2 indexed",
    "model-parallel 4",
    "core row 4 adam",
    "core column 2",
    "core row 4",
    "core table 4",
    "core replicated 2",
    "core train",
    "core bfloat16",
    "sparsecore 1x4 custom",
)
@pytest.mark.parametrize("name", runs.RUNS)
def test_numbers_are_those_of_before(name):
    actual = {f"{name}|{key}": array for key, array in runs.RUNS[name]().items()}
    found_now.update(actual)
    if IS_RECORDING:
        return
    assert sorted(actual) == sorted(key for key in EXPECTED if key.split("|")[0] == name)
    bits = BITS.get(runs.platform())
    for key, array in actual.items():
        assert array.dtype == EXPECTED[key].dtype
        np.testing.assert_allclose(array, EXPECTED[key], rtol=2e-5, atol=2e-6, err_msg=key)
        # The record may have no bits of this platform for numbers that were changed on purpose.
        assert bits is None or key not in bits or runs.digest(array) == bits[key], (
            f"{key}: other bits"
        )


def test_every_record_has_its_run():
    if IS_RECORDING and len({key.split("|")[0] for key in found_now}) == len(runs.RUNS):
        # If the numbers have changed, the bits of other platforms are out of date.
        is_same = EXPECTED.keys() == found_now.keys()
        for key, array in found_now.items():
            is_same = is_same and np.allclose(EXPECTED[key], array, rtol=2e-5, atol=2e-6)
        bits = BITS if is_same else {}
        numbers = EXPECTED if is_same else found_now
        bits[runs.platform()] = {key: runs.digest(array) for key, array in found_now.items()}
        np.savez_compressed(runs.RECORD, bits=json.dumps(bits), **numbers)
        return
    assert {key.split("|")[0] for key in EXPECTED} == set(runs.RUNS)
