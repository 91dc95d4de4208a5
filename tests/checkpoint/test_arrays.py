"""Arrays of a checkpoint are zarr arrays of any numbers, and are written and read in parts."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from numpy.testing import assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from tests.checkpoint.world import ramp
from tests.world import made_mesh

DTYPES = [
    "bool", "int4", "int8", "uint16", "int32", "uint64", "float8_e4m3fn", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128",
]  # fmt: skip
SHAPES = [(), (1,), (7,), (0,), (5, 0), (0, 3), (7, 3), (3, 2, 5), (2, 1, 1, 2)]


def numbers(shape, dtype):
    values = np.random.default_rng(0).integers(0, 255, (*shape, 16), np.uint8)
    return values[..., 0].astype(np.int8).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 22])
def test_any_numbers_of_any_shape_come_back_to_the_bit(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", chunk_bytes)
    tree = {f"{dtype}{shape}": numbers(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    tree |= {
        "signs": np.asarray([0.0, -0.0, np.nan, -np.inf], np.float32),
        "columns first": np.asfortranarray(numbers((7, 3), "float32")),
        "every other": numbers((9, 4), "float8_e4m3fn")[::2, 1::2],
    }
    checkpoint.save(tmp_path / "a", tree)
    for actual in (
        checkpoint.load(tmp_path / "a").tree,
        checkpoint.load(tmp_path / "a", tree).tree,
    ):
        for name, array in tree.items():
            assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
            assert actual[name].tobytes() == array.tobytes(), name


def table_of(rows, dim):
    return rs.TableSpec("item", rows, dim, initializer=ramp, optimizer=rs.optimizers.SGD(0.1))


def test_a_reader_of_zarr_that_knows_nothing_of_us_finds_a_table_in_the_order_of_its_ids(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 100)
    feature = rs.FeatureSpec("f", table_of(50, 4))
    collection = rs.EmbeddingCollection([feature], mesh=made_mesh(4), placement="row")
    state = collection.init(jax.random.key(0))
    state = collection.update(state, {"f": np.full((4, 1), 7)}, {"f": jnp.ones((4, 4))})
    checkpoint.save_collection(tmp_path / "a", collection, state)
    (folder,) = (
        entry["folder"]
        for entry in checkpoint.manifest(tmp_path / "a")["arrays"]
        if entry["path"] == ["tables", "item"]
    )
    store = {"driver": "file", "path": str(tmp_path / "a" / folder)}
    zarr = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
    assert_array_equal(zarr.read().result(), collection.tables(state)["item"])
    assert zarr.codec.to_json()["codecs"][-1] == {"name": "crc32c"}


@pytest.mark.slow_rows("None")
@pytest.mark.parametrize("num_devices", [None, 4])
def test_neither_save_nor_load_needs_memory_for_a_whole_table(tmp_path, monkeypatch, num_devices):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(checkpoint.arrays, "_BYTES_IN_FLIGHT", 1 << 18)
    feature = rs.FeatureSpec("f", table_of(60_000, 32))
    collection = rs.EmbeddingCollection(feature, mesh=made_mesh(num_devices))
    state = collection.init(jax.random.key(0))

    def with_peak(call, *arguments):
        # tracemalloc counts memory of numpy, but not that of devices.
        tracemalloc.start()
        try:
            return call(*arguments), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    path, table_bytes = tmp_path / "a", 60_000 * 32 * 4
    _, peak_of_save = with_peak(checkpoint.save_collection, path, collection, state)
    actual, peak_of_load = with_peak(checkpoint.load_collection, path, collection)
    assert_array_equal(collection.tables(actual)["item"], collection.tables(state)["item"])
    assert peak_of_save < table_bytes / 4
    # For a mesh, the rows of all devices of this process are in memory, here the whole table.
    assert peak_of_load < table_bytes * (1 / 4 if num_devices is None else 1.3)
