"""Servers that tests start: moto's S3, an HTTP server with ranges, and a connection
that counts, cuts or holds up what they send."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

BUCKET = "runs"
_START_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def s3_server() -> Iterator[int]:
    """Yield the port of an S3 server with an empty bucket."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end = time.monotonic() + _START_S
            while True:
                with suppress(OSError):
                    _request(port, f"/{BUCKET}", "PUT")
                    break
                assert time.monotonic() < end, "the S3 server does not answer"
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


def _request(port: int, path: str, method: str, data: bytes | None = None) -> None:
    url = f"http://127.0.0.1:{port}{path}"
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, data, headers, method=method)
    urllib.request.urlopen(request, timeout=10).close()


def check_keys(port: int, checks: bool) -> None:
    """Let the S3 server refuse keys that it has not made."""
    count = b"0" if checks else b"10000000"
    _request(port, "/moto-api/reset-auth", "POST", count)


def environment(port: int) -> dict[str, str]:
    """Return the variables with which commands use an S3 server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


class Connection:
    """A port in front of a server.

    Attributes:
        sent_bytes: Bytes that the server has sent.
        requests: Requests that it has got.
        cuts: Of so many next answers, only a part arrives.
        holds_up: Whether answers stop in the middle.
    """

    def __init__(self, server_port: int) -> None:
        self.sent_bytes = self.requests = self.cuts = 0
        self.holds_up = False
        self._server_port = server_port
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def close_all(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        self.cuts = 1_000_000
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for run in (self._requests, self._answers):
                    threading.Thread(
                        target=run, args=(client, server), daemon=True
                    ).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while part := client.recv(1 << 16):
                with self._lock:
                    self.requests += part.count(b" HTTP/1.1\r\n")
                server.sendall(part)
            server.shutdown(socket.SHUT_WR)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while part := server.recv(1 << 16):
                while self.holds_up:
                    time.sleep(0.05)
                with self._lock:
                    self.sent_bytes += len(part)
                    cut, self.cuts = self.cuts > 0, max(self.cuts - 1, 0)
                if cut:
                    client.sendall(part[: len(part) // 2])
                    break
                client.sendall(part)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Sends files, also parts of them."""

    protocol_version = "HTTP/1.1"
    ranges = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(404)
            return
        content, status = file.read_bytes(), 200
        wanted = self.headers.get("Range")
        if wanted and self.ranges:
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            content, status = content[int(begin) : int(end) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def http_server(folder: Path, ranges: bool = True) -> Iterator[str]:
    """Yield the URL of a folder. `ranges`: whether the server sends parts of files."""
    handler = partial(
        type("Handler", (_Handler,), {"ranges": ranges}), directory=os.fspath(folder)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
