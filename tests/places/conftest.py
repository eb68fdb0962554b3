"""Fixtures: one S3 server for all tests, and its environment in this process."""

import pytest

from mini_gpt.runtime import buckets
from tests.places import s3_server


@pytest.fixture(scope="session")
def _server(tmp_path_factory):
    with s3_server.running(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def server(_server, monkeypatch, tmp_path):
    """Return the server without faults. This process uses it too."""
    for name, value in _server.environment(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "WAITS", (0.0,) * 3)
    _server.log.clear()
    yield _server
    _server.fault = s3_server.no_fault
