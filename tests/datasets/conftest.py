"""Tests of data sets must not find data on the machine that runs them."""

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty folder in place of the cache of downloads, while RSEMBED_DATA is not set."""
    monkeypatch.delenv("RSEMBED_DATA", raising=False)
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("pooch.os_cache", lambda project: folder)
    return folder
