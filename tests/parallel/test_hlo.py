"""The reader of compiled programs finds what their collectives send."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from rsembed.parallel import make_mesh
from tests.parallel.hlo import collective_bytes

SHARD_BYTES = 64 * 3 * 4
BODIES = {
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "shard", 0, 0, tiled=True), SHARD_BYTES * 7 / 8),
    "all-gather": (lambda x: jax.lax.all_gather(x, "shard", tiled=True), SHARD_BYTES * 7),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, "shard", tiled=True),
        SHARD_BYTES * 7 / 8,
    ),
    "all-reduce": (lambda x: jax.lax.psum(x, "shard"), 2 * SHARD_BYTES * 7 / 8),
}


@pytest.mark.parametrize("name", BODIES)
def test_bytes_of_compiled_collectives(name):
    body, expected = BODIES[name]
    program = jax.shard_map(
        body, mesh=make_mesh(), in_specs=P("shard"), out_specs=P("shard"), check_vma=False
    )
    text = jax.jit(program).lower(jnp.zeros((512, 3))).compile().as_text()
    assert collective_bytes(text, 8) == {name: expected}


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
        ("%d = bf16[8,4]{1,0} all-gather-done(%g)", {}),
    ],
)
def test_other_forms_of_collectives_are_read(line, expected):
    assert collective_bytes(line, 8) == expected
