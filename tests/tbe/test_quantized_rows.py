import json
from pathlib import Path

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from rsembed.tbe.quantized_rows import decode_8bit_rows, encode_8bit_rows

CASES = json.loads((Path(__file__).parents[1] / "data" / "tbe_cases.json").read_text())["cases"]
floats = st.floats(-1000, 1000, width=32)


def test_the_published_bytes_are_reproduced():
    (case,) = (case for case in CASES if case["name"] == "fused_8bit_rowwise_format")
    encoded = encode_8bit_rows(np.array(case["inputs"]["x"], np.float32))
    np.testing.assert_array_equal(encoded, np.array(case["expected"]["bytes"], np.uint8))
    np.testing.assert_allclose(decode_8bit_rows(encoded), case["expected"]["dequantized"], **case["tolerance"])


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(hnp.arrays(np.float32, (3, 5), elements=floats))
def test_decoding_returns_within_half_a_scale(rows):
    encoded = encode_8bit_rows(rows)
    assert encoded.shape == (3, 13)
    decoded = decode_8bit_rows(encoded)
    for row, found in zip(rows.astype(np.float64), decoded.astype(np.float64), strict=True):
        width = row.max() - row.min()
        # The 1e-8 below the fraction pulls codes of tiny ranges down; the last terms are float32's.
        lost = width * (1e-8 / (width + 1e-8))
        assert np.abs(row - found).max() <= 0.502 * width / 255 + lost + 1e-6 * np.abs(row).max()


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-30])
def test_constant_rows_come_back_exactly(value):
    rows = np.full((2, 6), value, np.float32)
    np.testing.assert_array_equal(decode_8bit_rows(encode_8bit_rows(rows)), rows)


def test_scale_and_bias_stand_behind_the_codes():
    encoded = encode_8bit_rows(np.array([[-1.0, 0.0, 254.0]], np.float32))
    assert encoded[0, :3].tolist() == [0, 1, 255]
    assert np.frombuffer(encoded[0, 3:].tobytes(), "<f4").tolist() == [1.0, -1.0]


def test_no_rows_at_all_keep_their_width():
    assert decode_8bit_rows(encode_8bit_rows(np.zeros((0, 4), np.float32))).shape == (0, 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_rows_without_a_finite_range_are_refused_by_number(bad):
    rows = np.zeros((3, 2), np.float32)
    rows[1] = [bad, -3e38]
    with pytest.raises(ValueError, match=r"row 1 runs from .* no 8-bit scale; clip"):
        encode_8bit_rows(rows)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"at least one column, got shape \(2, 0\)"):
        encode_8bit_rows(np.zeros((2, 0), np.float32))
    with pytest.raises(ValueError, match=r"dim \+ 8 columns, got uint8 of shape \(2, 8\)"):
        decode_8bit_rows(np.zeros((2, 8), np.uint8))
