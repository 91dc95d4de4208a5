"""Every client keeps what it is told, shares it, and says what is missing."""

import concurrent.futures
import contextlib
import io
import resource
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from rsembed import archives
from rsembed.fdo import (
    CSVFileFDOClient,
    MemoryFDOClient,
    NPZFileFDOClient,
    SparseDenseMatmulInputStats,
)
from rsembed.fdo.client import merge_processes, record_of, to_statistics


def stats(max_ids, max_unique=(1, 1), required=(8, 8), dropped=0, stack="t"):
    return SparseDenseMatmulInputStats(
        *(
            {stack: values}
            for values in (
                np.asarray(max_ids),
                np.asarray(max_unique),
                np.asarray(required),
                dropped,
            )
        )
    )


CLIENTS = {
    "npz": NPZFileFDOClient,
    "npz_maximum": lambda folder: NPZFileFDOClient(folder, retain_history=False),
    "csv": CSVFileFDOClient,
    "csv_maximum": lambda folder: CSVFileFDOClient(folder, retain_history=False),
    "memory": lambda folder: MemoryFDOClient(),
}


@pytest.fixture(params=CLIENTS)
def client(request, tmp_path):
    return CLIENTS[request.param](str(tmp_path / "new" / "folder"))


def test_the_maximum_of_all_records_survives(client):
    client.record(stats([3, 4], required=[16, 24]))
    client.record(stats([5, 2], required=[24, 16], dropped=7))
    client.publish()
    loaded = client.load()
    assert np.max(np.atleast_2d(loaded.max_ids_per_partition["t"]), axis=0).tolist() == [5, 4]
    assert np.max(loaded.required_buffer_size_per_sc["t"]) == 24
    assert np.max(loaded.id_drop_counters["t"]) == 7
    assert np.max(loaded.max_unique_ids_per_partition["t"]) == 1


def test_loading_before_publishing_says_so(client):
    client.record(stats([1, 2]))
    with pytest.raises((FileNotFoundError, LookupError), match="publish"):
        client.load()


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_histories_have_a_row_per_record_and_loading_keeps_what_was_not_published(kind, tmp_path):
    client, other = CLIENTS[kind](str(tmp_path)), CLIENTS[kind](str(tmp_path))
    for value in range(3):
        client.record(stats([value, 1]))
    client.publish()
    other.record(stats([9, 9]))
    assert other.load().max_ids_per_partition["t"].tolist() == [[0, 1], [1, 1], [2, 1]]
    other.record(stats([7, 7]))
    other.publish()
    assert client.load().max_ids_per_partition["t"].tolist() == [
        [0, 1],
        [1, 1],
        [2, 1],
        [9, 9],
        [7, 7],
    ]
    client.load()  # what is published is counted once
    client.publish()
    assert client.load().max_ids_per_partition["t"].tolist() == [
        [0, 1],
        [1, 1],
        [2, 1],
        [9, 9],
        [7, 7],
    ]


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_client_leaves_one_file_however_often_it_publishes(kind, tmp_path):
    client = CLIENTS[kind](str(tmp_path))
    for value in range(4):
        client.record(stats([value, 1]))
        client.publish()
    (path,) = tmp_path.iterdir()
    assert path.match(f"fdo_stats_0_*.{kind}")


@pytest.mark.parametrize("kind", ["npz_maximum", "csv_maximum"])
def test_a_full_disk_leaves_no_torn_file_and_the_next_publish_has_all_records(kind, tmp_path):
    client = CLIENTS[kind](str(tmp_path))
    client.record(stats(np.arange(10_000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            client.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    client.publish()
    np.testing.assert_array_equal(client.load().max_ids_per_partition["t"], np.arange(10_000))


@pytest.mark.parametrize("kind", ["npz_maximum", "csv_maximum"])
def test_records_between_publish_and_load_are_published_next(kind, tmp_path):
    client = CLIENTS[kind](str(tmp_path))
    client.record(stats([1, 2]))
    client.publish()
    client.record(stats([9, 1]))
    assert client.load().max_ids_per_partition["t"].tolist() == [1, 2]
    client.publish()
    assert client.load().max_ids_per_partition["t"].tolist() == [9, 2]


@pytest.mark.parametrize("kind", ["npz_maximum", "csv_maximum"])
def test_files_of_a_running_maximum_keep_their_size(kind, tmp_path):
    client, sizes = CLIENTS[kind](str(tmp_path)), set()
    for value in range(50):
        client.record(stats([10 + value % 7, 10]))
        client.publish()
        sizes.add(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert len(sizes) == 1
    assert client.load().max_ids_per_partition["t"].tolist() == [16, 10]


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_what_earlier_clients_published_stays_until_it_is_loaded(kind, tmp_path):
    for values in ([99, 2], [5, 7]):
        client = CLIENTS[kind](str(tmp_path))
        client.record(stats(values))
        client.publish()
    assert client.load().max_ids_per_partition["t"].tolist() == [99, 7]
    client.publish()
    assert len(list(tmp_path.iterdir())) == 1
    assert client.load().max_ids_per_partition["t"].tolist() == [99, 7]


def test_processes_with_other_layouts_are_refused():
    with pytest.raises(
        ValueError, match="'t_max_ids' has 2 values, but was recorded with 1 before or in another"
    ):
        merge_processes([{"t_max_ids": np.asarray([1])}, {"t_max_ids": np.asarray([1, 2])}])


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_any_number_of_processes_gets_the_maximum_of_all(
    kind, num_processes, tmp_path, monkeypatch, caplog
):
    for process, values in enumerate(([3, 4], [5, 2], [4, 9])):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        client = CLIENTS[kind](str(tmp_path))
        client.record(stats(values))
        client.record(stats([1, 1]))
        client.publish()
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    monkeypatch.setattr("rsembed.fdo.client.multihost_utils.sync_global_devices", lambda name: None)
    assert client.load().max_ids_per_partition["t"].tolist() == [5, 9]
    strangers = [0, 1, 2][num_processes:]
    assert [record.args[1] for record in caplog.records] == [strangers] * bool(strangers)


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_clients_that_publish_beside_each_other_lose_nothing(kind, tmp_path):
    clients = [CLIENTS[kind](str(tmp_path)) for _ in range(3)]
    for number, client in enumerate(clients):
        client.record(stats([number, 5 - number]))

    def publish_often(client):
        for _ in range(5):
            client.publish()

    with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(publish_often, clients))
    assert clients[0].load().max_ids_per_partition["t"].tolist() == [2, 5]
    clients[0].publish()  # what it has loaded, it replaces
    (path,) = tmp_path.iterdir()
    assert CLIENTS[kind](str(tmp_path)).load().max_ids_per_partition["t"].tolist() == [2, 5], path


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(kind, tmp_path, monkeypatch):
    client, read_bytes, reads = CLIENTS[kind](str(tmp_path)), Path.read_bytes, []

    def read_too_late(path):
        reads.append(path)
        if len(reads) == 1:
            client.publish()
        return read_bytes(path)

    client.record(stats([3, 4]))
    client.publish()
    monkeypatch.setattr(Path, "read_bytes", read_too_late)
    assert CLIENTS[kind](str(tmp_path)).load().max_ids_per_partition["t"].tolist() == [3, 4]
    assert len(set(reads)) == 2


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_file_that_was_cut_off_or_changed_is_refused_by_name(kind, tmp_path):
    client = CLIENTS[kind](str(tmp_path))
    client.record(stats([8780, 4]))
    client.record(stats([826, 4], stack="other"))
    client.publish()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    damaged = [content[:length] for length in range(0, len(content), 7)]
    for place in range(0, len(content), 5):
        damaged.append(
            content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        )
    for other in damaged:
        path.write_bytes(other)
        with pytest.raises(ValueError, match=rf"{path.name} in .* is damaged"):
            client.load()
    path.write_bytes(content)
    assert client.load().max_ids_per_partition["t"].tolist() == [8780, 4]


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_files_with_published_names_load_if_they_are_whole(kind, tmp_path):
    client = CLIENTS[kind](str(tmp_path))
    client.record(stats([8780, 4]))
    client.publish()
    (path,) = tmp_path.iterdir()
    published = path.rename(tmp_path / f"fdo_stats_0_17.{kind}")
    published.with_stem("fdo_stats_0_9").write_bytes(b"older, and never read")
    assert CLIENTS[kind](str(tmp_path)).load().max_ids_per_partition["t"].tolist() == [8780, 4]
    content = published.read_bytes()
    damaged = [
        content[:-3],
        *(content[:place] + b"\x9f" + content[place + 1 :] for place in range(len(content))),
    ]
    for other in damaged:  # a name without a checksum does not tell numbers that changed
        published.write_bytes(other)
        with contextlib.suppress(ValueError):
            client.load()
    published.write_bytes(damaged[0])
    with pytest.raises(ValueError, match=rf"fdo_stats_0_17.{kind} in .* cannot be read"):
        client.load()
    published.unlink()
    published.mkdir()
    with pytest.raises(
        ValueError, match=rf"fdo_stats_0_17.{kind} cannot be read: it is a directory"
    ):
        client.load()


def test_arrays_that_declare_more_than_they_have_are_refused_before_they_are_allocated(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(archives, "MOST_UNPACKED_BYTES", 1 << 20)
    name = "fdo_stats_0_1.npz"

    def refused(members, message, compression=zipfile.ZIP_STORED):
        with zipfile.ZipFile(tmp_path / name, "w", compression) as archive:
            for member, content in members.items():
                archive.writestr(f"{member}_max_ids.npy", content)
        with pytest.raises(ValueError, match=rf"{name} in .* cannot be read: .*{message}"):
            NPZFileFDOClient(tmp_path).load()

    def array(shape, descr="<i8", numbers=bytes(32)):
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        return file.getvalue() + numbers

    for shape in ((2**40,), (2**40, 2**10), (5,), (3,), (2**80,), (-4,)):
        refused({"words": array(shape)}, r"declares int64\[.*\], but has 32 bytes")
    refused({"words": array((4, 1, 1))}, "no list or table")
    refused({"words": array((4,), "|O")}, "no list or table")
    refused({"words": b"\x93NUMPY\x03\x00" + array((4,))[8:]}, "no header")
    refused({"words": array((4,))[:20]}, "words")
    refused({"words": bytes(3 << 20)}, "hold more than 1048576 bytes", zipfile.ZIP_DEFLATED)
    refused(
        {key: bytes(1 << 19) for key in "abc"}, "'b_max_ids.npy'|hold more", zipfile.ZIP_DEFLATED
    )
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("words_max_ids.npy", array((4,)))
    assert (
        NPZFileFDOClient(tmp_path)._decode((tmp_path / name).read_bytes())["words_max_ids"].tolist()
        == [0] * 4
    )


def test_numbers_and_lines_that_do_not_fit_are_refused_by_file(tmp_path):
    for values in (str(10**30), "1" * 200_000, "x"):
        (tmp_path / "fdo_stats_0_1.csv").write_bytes(
            f"key,values\r\nwords_max_ids,{values}\r\n".encode()
        )
        with pytest.raises(ValueError, match=r"fdo_stats_0_1\.csv in .* cannot be read"):
            CSVFileFDOClient(tmp_path).load()


def test_csv_files_have_the_published_form(tmp_path):
    client = CSVFileFDOClient(str(tmp_path))
    client.record(stats([3, 4]))
    client.record(stats([5, 2]))
    client.publish()
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\r\n")
    assert lines[:3] == [b"key,values", b"t_max_ids,3 4", b"t_max_ids,5 2"]
    assert lines[-1] == b""


def test_files_with_unknown_statistics_are_refused(tmp_path):
    np.savez(tmp_path / "fdo_stats_0_1.npz", t_surprise=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="'t_surprise' ends in none of _max_ids"):
        NPZFileFDOClient(str(tmp_path)).load()
    (tmp_path / "fdo_stats_0_2.csv").write_text("name;value\n")
    with pytest.raises(ValueError, match="starts with the line 'key,values'"):
        CSVFileFDOClient(str(tmp_path)).load()


def test_stack_names_may_end_like_statistics():
    statistics = to_statistics(record_of(stats([3, 4], stack="a_max_ids")))
    assert list(statistics.max_ids_per_partition) == ["a_max_ids"]
    assert list(statistics.max_unique_ids_per_partition) == ["a_max_ids"]


def test_a_single_process_keeps_its_history():
    history = {"t_max_ids": np.asarray([[1, 2], [3, 0]])}
    assert merge_processes([history])["t_max_ids"].tolist() == [[1, 2], [3, 0]]
    assert merge_processes([history, history])["t_max_ids"].tolist() == [3, 2]


def test_statistics_are_a_tree_of_arrays():
    """As in the published library, where clients take the largest count of each stack by `jax.tree.map`."""
    counts = stats([3, 9], max_unique=(2, 1), required=(8, 24), dropped=7)
    largest = jax.tree.map(np.max, counts)
    assert [largest.max_ids_per_partition, largest.max_unique_ids_per_partition] == [
        {"t": 9},
        {"t": 2},
    ]
    assert [largest.required_buffer_size_per_sc, largest.id_drop_counters] == [{"t": 24}, {"t": 7}]
    assert [leaf.tolist() for leaf in jax.tree.leaves(jax.tree.map(np.asarray, counts))] == [
        [3, 9],
        [2, 1],
        [8, 24],
        7,
    ]


def test_buffer_sizes_per_device():
    statistics = stats([3, 4], required=[16, 24])
    assert statistics.get_required_buffer_size_per_device("t") == 48
    assert statistics.get_required_buffer_size_per_device("t", num_sc_per_device=4) == 96
    assert statistics.get_required_buffer_size_per_device("unknown") is None
    statistics.set_required_buffer_size_per_device("t", 80)
    assert statistics.required_buffer_size_per_sc["t"].tolist() == [40.0, 40.0]
    statistics.set_required_buffer_size_per_device("new", 90, num_sc_per_device=3)
    assert statistics.required_buffer_size_per_sc["new"].tolist() == [30.0] * 3
