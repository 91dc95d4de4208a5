"""Tests of the reader of collectives in HLO text.

tests/collection/test_mesh_properties.py and tests/tt/test_storage.py read whole programs.
"""

import pytest

from tests.parallel.hlo import collective_bytes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%a = (f32[1,64,8]{2,1,0}, f32[1,64,8]{2,1,0}) all-to-all(f32[1,64,8]{2,1,0} %x, f32[1,64,8]{2,1,0} %y), "
            "replica_groups={{0,1},{2,3}}",
            {"all-to-all": 2 * 64 * 8 * 4 / 2},
        ),
        (
            "%g = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            {"all-gather": 8 * 4 * 2 * 3 / 4},
        ),
        (
            "%r = s32[] all-reduce(s32[] %x), replica_groups={}, to_apply=%add",
            {"all-reduce": 2 * 4 * 7 / 8},
        ),
        (
            "%s = f32[64,3]{1,0} reduce-scatter(f32[512,3]{1,0} %x), replica_groups={}",
            {"reduce-scatter": 512 * 3 * 4 * 7 / 8},
        ),
        ("%d = bf16[8,4]{1,0} all-gather-done(%g)", {}),
    ],
)
def test_every_form_of_collectives_is_read(line, expected):
    assert collective_bytes(line, 8) == expected
