"""The HTTP server that Prometheus scrapes."""

from __future__ import annotations

import socket
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import NamedTuple

from prometheus_client import CollectorRegistry, MetricsHandler

from ebbtide.errors import UserError

_LOCALHOST = "127.0.0.1"
_MAX_PORT = 65_535


class Address(NamedTuple):
    """An address to listen on; port 0: any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse `9400`, `HOST:9400` or `[::1]:9400`; without a host it is 127.0.0.1. Raises ValueError for others."""
    host, _, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not 0 <= number <= _MAX_PORT or (":" in bare and bare == host) or (":" in text and not bare):
        raise ValueError(f"{text!r} is not a port (0 to {_MAX_PORT}) or HOST:PORT, like 9400 or 0.0.0.0:9400")
    return Address(bare or _LOCALHOST, number)


class _Handler(MetricsHandler):
    # Of a client that sends nothing.
    timeout = 10


class _Server(ThreadingHTTPServer):
    """Listens from its creation on, and answers each request in a thread."""

    def __init__(self, address: Address) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a search for the host's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the standard error is that of the job."""


class MetricsServer:
    """Serves the metrics of one trace, from threads of this process. Raises UserError if it cannot listen.

    It listens from its creation on, and answers from `start` on; a fork between the two may call `start`."""

    def __init__(self, address: Address) -> None:
        try:
            self._server = _Server(address)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"cannot serve metrics on {address}: {reason}; choose another address, or port 0 for a free one"
            ) from None
        self._thread: threading.Thread | None = None
        self.url = f"http://{Address(address.host, self._server.server_port)}/metrics"

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._server.fileno()

    def start(self, trace: Path) -> None:
        """Serve the metrics of a trace, which need not exist yet."""
        self._thread = threading.Thread(
            target=self._serve, args=(trace.absolute(),), name="ebbtide metrics", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the server has been closed. A signal such as that of Ctrl-C raises its exception here."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop to answer and to listen."""
        if self._thread is not None:
            self._server.shutdown()
        self._server.server_close()

    def _serve(self, trace: Path) -> None:
        # This import takes a second: scrapes wait for it, nothing else does.
        from ebbtide.analysis.export.prometheus.collector import LiveTraceCollector

        registry = CollectorRegistry()
        registry.register(LiveTraceCollector(trace))
        self._server.RequestHandlerClass = _Handler.factory(registry)
        self._server.serve_forever()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
