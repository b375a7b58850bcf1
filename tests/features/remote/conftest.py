"""An S3 server that has a trace of four ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from ebbtide.features.remote import file_systems, files
from tests.features.remote.servers import BUCKET, Connection, environment, s3_server

TRACE = Path(__file__).parents[3] / "traces" / "h100-20b-async.ebb"
URL = f"s3://{BUCKET}/jobs/{TRACE.name}"


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a server that has `TRACE` at `URL`."""
    pytest.importorskip("moto")
    with s3_server() as port:
        variables = environment(port)
        store = fs.S3FileSystem(
            access_key="key",
            secret_key="secret",
            endpoint_override=variables["AWS_ENDPOINT_URL"],
        )
        fs.copy_files(
            str(TRACE), URL.removeprefix("s3://"), destination_filesystem=store
        )
        yield port


@pytest.fixture
def connection(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """A connection to the server, which commands use, and which they give up soon."""
    connection = Connection(s3_port)
    os.environ |= environment(connection.port)
    monkeypatch.setattr(files, "_RETRIES_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(file_systems, "_READ_S", 1.0)
    file_systems.arrow_file_system.cache_clear()
    yield connection
    file_systems.arrow_file_system.cache_clear()
    connection.close()
