"""Bad fields of specs, collections and plans."""

import rsembed as rs
from tests.bad_calls.world import NAN, feature, mesh, one, plan, table

BAD = {
    "dim text": (
        lambda: table(embedding_dim="4"),
        TypeError, "table 'word': embedding_dim must be an integer, got '4'", "got '4' (str)",
    ),
    "combiner list": (
        lambda: table(combiner=["sum"]), ValueError, "table 'word': unknown combiner ['sum']; choose one of sum,",
    ),
    "dtype None": (lambda: table(dtype=None), ValueError, "table 'word': dtype None is not one of float32, bfloat16,"),
    "dtype list": (
        lambda: table(dtype=["float32"]), ValueError, "table 'word': dtype ['float32'] is not one of float32,",
    ),
    "optimizer class": (
        lambda: table(optimizer=rs.SGDOptimizerSpec), TypeError, "table 'word': optimizer must be made first, as in",
    ),
    "storage dict": (
        lambda: table(storage={}),
        TypeError, "table 'word': storage, such as rsembed.Hashed(...), must be", "got {} (dict)",
    ),
    "limit None": (
        lambda: table(max_ids_per_partition=None),
        TypeError, "table 'word': max_ids_per_partition must be an integer, got", "got None (NoneType)",
    ),
    "coo buffer -1": (
        lambda: table(suggested_coo_buffer_size_per_device=-1),
        ValueError, "table 'word': suggested_coo_buffer_size_per_device must be", "got -1",
    ),
    "quantization NaN": (
        lambda: rs.QuantizationConfig(NAN, 1.0, 4),
        ValueError, "QuantizationConfig: min_value nan must be below max_value",
    ),
    "quantization text": (
        lambda: rs.QuantizationConfig("0", 1.0, 4),
        TypeError, "QuantizationConfig: min_value must be a number, got '0'", "got '0' (str)",
    ),
    "input shape nested": (
        lambda: feature(input_shape=((8, 2),)),
        TypeError, "feature 'title': input_shape must be an integer, got (8, 2)", "got (8, 2) (tuple)",
    ),
    "output dim zero": (
        lambda: feature(output_shape=(8, 0)), ValueError, "feature 'title': output_shape must be in [1, inf), got 0.",
    ),
    "mesh tuple": (
        lambda: one(mesh=(2,)),
        TypeError, "EmbeddingCollection: mesh must be a mesh (jax.make_mesh", "got (2,) (tuple)",
    ),
    "axis empty": (
        lambda: one(mesh=mesh(), sharding_axis=()),
        ValueError, "sharding_axis=() must name axes of the mesh once each,",
    ),
    "placement number": (
        lambda: one(mesh=mesh(), placement=1),
        TypeError, "EmbeddingCollection: placement must be a text or a mapping", "got 1 (int)",
    ),
    "bounds None": (
        lambda: one(bounds_check=None),
        TypeError, "EmbeddingCollection: bounds_check must be a text, got None", "got None (NoneType)",
    ),
    "plan groups flat": (
        lambda: plan(groups=["s", "t"]),
        TypeError, "plan_stacking: groups[0] must be a list (each a text), got", "got 's' (str)",
    ),
    "plan groups of specs": (
        lambda: plan(groups=[[table("s"), table("t")]]),
        TypeError, "plan_stacking: groups[0][0] must be a text, got a value of", "got a value of type TableSpec",
    ),
    "plan mem float": (
        lambda: plan(activation_mem_bytes_limit=1.5),
        TypeError, "plan_stacking: activation_mem_bytes_limit must be an", "got 1.5 (float)",
    ),
    "plan.stack number": (lambda: plan().stack(0), KeyError, "no stack 0; the plan has ['s_t']."),
}  # fmt: skip
