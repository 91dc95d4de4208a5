"""Tests of clients, which record, publish and load statistics."""

import concurrent.futures
import contextlib
import functools
import io
import resource
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from rsembed import archives
from rsembed.fdo import CSVFileFDOClient, MemoryFDOClient, NPZFileFDOClient
from rsembed.fdo.client import record_of, to_statistics
from tests.fdo.world import stats

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


@pytest.fixture(params=["npz", "csv"])
def new_client(request, tmp_path):
    """Makes clients of one folder that keep every record."""
    return functools.partial(CLIENTS[request.param], str(tmp_path))


@pytest.fixture(params=["npz_maximum", "csv_maximum"])
def new_maximum(request, tmp_path):
    """Makes clients of one folder that keep only the maximum of all records."""
    return functools.partial(CLIENTS[request.param], str(tmp_path))


def loaded(client):
    return client.load().max_ids_per_partition["t"].tolist()


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


def test_histories_have_a_row_per_record_and_loading_keeps_what_was_not_published(new_client):
    client, other = new_client(), new_client()
    for value in range(3):
        client.record(stats([value, 1]))
    client.publish()
    other.record(stats([9, 9]))
    assert loaded(other) == [[0, 1], [1, 1], [2, 1]]
    other.record(stats([7, 7]))
    other.publish()
    every_record = [[0, 1], [1, 1], [2, 1], [9, 9], [7, 7]]
    assert loaded(client) == every_record
    # A client that loads its own published records counts them once.
    client.load()
    client.publish()
    assert loaded(client) == every_record


def test_a_full_disk_leaves_no_torn_file_and_the_next_publish_has_all_records(
    new_maximum, tmp_path
):
    client = new_maximum()
    client.record(stats(range(10_000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            client.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    client.publish()
    assert loaded(client) == list(range(10_000))


def test_a_maximum_has_one_row_and_records_between_publish_and_load_are_published_next(new_maximum):
    client = new_maximum()
    client.record(stats([1, 2]))
    client.record(stats([0, 1]))
    client.publish()
    client.record(stats([9, 1]))
    assert loaded(client) == [1, 2]
    client.publish()
    assert loaded(client) == [9, 2]


def test_what_earlier_clients_published_stays_until_it_is_loaded(new_client, tmp_path):
    for values in ([99, 2], [5, 7]):
        client = new_client()
        client.record(stats(values))
        client.publish()
    assert loaded(client) == [99, 7]
    client.publish()
    assert len(list(tmp_path.iterdir())) == 1
    assert loaded(client) == [99, 7]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_any_number_of_processes_gets_the_maximum_of_all(
    new_client, num_processes, monkeypatch, caplog
):
    for process, values in enumerate(([3, 4], [5, 2], [4, 9])):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        client = new_client()
        client.record(stats(values))
        client.record(stats([1, 1]))
        client.publish()
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    monkeypatch.setattr("rsembed.fdo.client.multihost_utils.sync_global_devices", lambda name: None)
    assert loaded(client) == [5, 9]
    strangers = [0, 1, 2][num_processes:]
    assert [record.args[1] for record in caplog.records] == [strangers] * bool(strangers)


def test_clients_that_publish_beside_each_other_lose_nothing(new_client, tmp_path):
    clients = [new_client() for _ in range(3)]
    for number, client in enumerate(clients):
        client.record(stats([number, 5 - number]))

    def publish_often(client):
        for _ in range(5):
            client.publish()

    with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(publish_often, clients))
    # A client that has loaded nothing replaces only its own file.
    assert len(list(tmp_path.iterdir())) == 3
    assert loaded(clients[0]) == [2, 5]
    # A client also replaces the files that it has loaded.
    clients[0].publish()
    assert len(list(tmp_path.iterdir())) == 1
    assert loaded(new_client()) == [2, 5]


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(new_client, monkeypatch):
    client, read_bytes, reads = new_client(), Path.read_bytes, []

    def read_too_late(path):
        reads.append(path)
        if len(reads) == 1:
            client.publish()
        return read_bytes(path)

    client.record(stats([3, 4]))
    client.publish()
    monkeypatch.setattr(Path, "read_bytes", read_too_late)
    assert loaded(new_client()) == [3, 4]
    assert len(set(reads)) == 2


def test_a_file_that_was_cut_off_or_changed_is_refused_by_name(new_client, tmp_path):
    client = new_client()
    client.record(stats([8780, 4]))
    client.record(stats([826, 4], stack="other"))
    client.publish()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    damaged = [content[:length] for length in range(0, len(content), 7)]
    for place in range(0, len(content), 5):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        damaged.append(changed)
    for other in damaged:
        path.write_bytes(other)
        with pytest.raises(ValueError, match=rf"{path.name} in .* is damaged"):
            client.load()
    path.write_bytes(content)
    assert loaded(client) == [8780, 4]


def test_files_with_published_names_load_if_they_are_whole(new_client, tmp_path):
    client = new_client()
    client.record(stats([8780, 4]))
    client.publish()
    (path,) = tmp_path.iterdir()
    published = path.rename(tmp_path / f"fdo_stats_0_17{path.suffix}")
    published.with_stem("fdo_stats_0_9").write_bytes(b"older, and never read")
    assert loaded(new_client()) == [8780, 4]
    content = published.read_bytes()
    for place in range(len(content)):
        # The name of the file has no checksum, so the client may not notice a changed number.
        published.write_bytes(content[:place] + b"\x9f" + content[place + 1 :])
        with contextlib.suppress(ValueError):
            client.load()
    published.write_bytes(content[:-3])
    with pytest.raises(ValueError, match=rf"{published.name} in .* cannot be read"):
        client.load()
    published.unlink()
    published.mkdir()
    with pytest.raises(ValueError, match=rf"{published.name} cannot be read: it is a directory"):
        client.load()


def test_arrays_that_declare_more_than_they_have_are_refused_before_they_are_allocated(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(archives, "MOST_UNPACKED_BYTES", 1 << 20)
    path = tmp_path / "fdo_stats_0_1.npz"

    def write(*contents):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for stack, content in zip("abc", contents, strict=False):
                archive.writestr(f"{stack}_max_ids.npy", content)

    def array(*shape, descr="<i8"):
        file = io.BytesIO()
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue() + bytes(32)

    def refused(message, *contents):
        write(*contents)
        with pytest.raises(ValueError, match=rf"{path.name} in .* cannot be read: .*{message}"):
            NPZFileFDOClient(tmp_path).load()

    for shape in ((2**40,), (2**40, 2**10), (5,), (3,), (2**80,), (-4,)):
        refused(r"declares int64\[.*\], but has 32 bytes", array(*shape))
    refused("no list or table", array(4, 1, 1))
    refused("no list or table", array(4, descr="|O"))
    refused("no header", b"\x93NUMPY\x03\x00" + array(4)[8:])
    refused("a_max_ids", array(4)[:20])
    refused("hold more than 1048576 bytes", bytes(3 << 20))
    refused("'b_max_ids.npy'|hold more", *[bytes(1 << 19)] * 3)
    write(array(4))
    assert NPZFileFDOClient(tmp_path).load().max_ids_per_partition["a"].tolist() == [0] * 4


def test_csv_files_have_the_published_form(tmp_path):
    client = CSVFileFDOClient(str(tmp_path))
    client.record(stats([3, 4]))
    client.record(stats([5, 2]))
    client.publish()
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\r\n")
    assert lines[:3] == [b"key,values", b"t_max_ids,3 4", b"t_max_ids,5 2"]
    assert lines[-1] == b""


def test_stack_names_may_end_like_statistics():
    statistics = to_statistics(record_of(stats([3, 4], stack="a_max_ids")))
    assert list(statistics.max_ids_per_partition) == ["a_max_ids"]
    assert list(statistics.max_unique_ids_per_partition) == ["a_max_ids"]


def test_statistics_are_a_tree_of_arrays():
    """Clients of the published library use `jax.tree.map` for the largest count of each stack."""
    counts = stats([3, 9], max_unique=(2, 1), required=(8, 24), dropped=7)
    assert vars(jax.tree.map(np.max, counts)) == {
        "max_ids_per_partition": {"t": 9},
        "max_unique_ids_per_partition": {"t": 2},
        "required_buffer_size_per_sc": {"t": 24},
        "id_drop_counters": {"t": 7},
        "id_drops_by_table": {},
    }


def test_buffer_sizes_per_device():
    statistics = stats([3, 4], required=[16, 24])
    assert statistics.get_required_buffer_size_per_device("t") == 48
    assert statistics.get_required_buffer_size_per_device("t", num_sc_per_device=4) == 96
    assert statistics.get_required_buffer_size_per_device("unknown") is None
    statistics.set_required_buffer_size_per_device("t", 80)
    assert statistics.required_buffer_size_per_sc["t"].tolist() == [40.0, 40.0]
    statistics.set_required_buffer_size_per_device("new", 90, num_sc_per_device=3)
    assert statistics.required_buffer_size_per_sc["new"].tolist() == [30.0] * 3
