"""No data of this machine and no network."""

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache, and no RSEMBED_DATA."""
    monkeypatch.delenv("RSEMBED_DATA", raising=False)
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("pooch.os_cache", lambda project: folder)
    return folder
