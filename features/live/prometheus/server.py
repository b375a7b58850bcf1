"""The HTTP server that Prometheus scrapes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, MetricsHandler, core
from prometheus_client.registry import Collector

import ebbtide
from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.errors import UserError
from ebbtide.features.live.trace import LiveMemory, LiveTrace
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.agent.spool import POOLS

Kind = Literal["counter", "gauge", "info", "summary"]
_RANK = ("rank",)
_DEVICE = ("rank", "device")
_PHASE = (*_DEVICE, "phase")
# The pools of recordings, and of other sources. A file may have more.
MEMORY_POOLS = (*POOLS, "cuda", "host", "tensors")
# A host has fewer. `ebbtide_ranks` counts those beyond it, too.
MAX_RANKS = 128
# A scrape reads on in a long recording for so long; the next one goes on from there.
_READ_S = 2.0
_GPU = {
    "utilization_percent": ("ebbtide_gpu_utilization_ratio", 1e-2),
    "power_w": ("ebbtide_gpu_power_watts", 1.0),
    "temperature_celsius": ("ebbtide_gpu_temperature_celsius", 1.0),
    "sm_clock_mhz": ("ebbtide_gpu_sm_clock_hertz", 1e6),
}


class Family(NamedTuple):
    """One metric."""

    # Its type. A summary has the median over the last iterations as its quantile 0.5.
    kind: Kind
    text: str  # Its description.
    labels: tuple[str, ...]  # Names of its labels.


# Type -> what the names of its samples have after the name of the metric, in the order
# of the values of a `_Sample`.
SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "info": ("_info",),
    "summary": ("_sum", "_count", ""),
}
# Every label has a bounded number of values: ranks of the job (MAX_RANKS of them), each
# with one device,
# four phases, MEMORY_POOLS, two directions. An info has one series.
FAMILIES = {
    "ebbtide_recording": Family("info", "The recording.", ("trace", "host", "version")),
    "ebbtide_ranks": Family(
        "gauge", "Ranks that have begun to record on this host.", ()
    ),
    "ebbtide_rank_recording": Family(
        "gauge", "1 while the rank records, 0 when it is silent or has ended.", _RANK
    ),
    "ebbtide_iterations": Family(
        "counter", "Finished iterations since the recording began.", _RANK
    ),
    "ebbtide_iteration_seconds": Family(
        "summary", "Time of finished iterations.", _RANK
    ),
    "ebbtide_phase_seconds": Family(
        "summary",
        "Time of a phase in finished iterations: forward, backward, update, or other.",
        (*_RANK, "phase"),
    ),
    "ebbtide_memory_bytes": Family(
        "gauge", "Newest value of a memory pool.", (*_DEVICE, "pool")
    ),
    "ebbtide_memory_capacity_bytes": Family("gauge", "Memory of the device.", _DEVICE),
    "ebbtide_free_bytes": Family("gauge", "Free memory of the device now.", _DEVICE),
    "ebbtide_phase_peak_bytes": Family(
        "gauge", "Peak in a phase, median over the last iterations.", _PHASE
    ),
    "ebbtide_phase_free_bytes": Family(
        "gauge", "Least free memory in a phase, median as of the peaks.", _PHASE
    ),
    "ebbtide_link_bytes": Family(
        "counter", "Bytes moved over the link: h2d, d2h.", (*_DEVICE, "direction")
    ),
    "ebbtide_link_peak_bytes_per_second": Family(
        "gauge", "Peak of the link in one direction.", _DEVICE
    ),
    "ebbtide_gpu_utilization_ratio": Family(
        "gauge", "Share of time in which a kernel ran (NVML).", _DEVICE
    ),
    "ebbtide_gpu_power_watts": Family("gauge", "Power of the GPU.", _DEVICE),
    "ebbtide_gpu_temperature_celsius": Family(
        "gauge", "Temperature of the GPU.", _DEVICE
    ),
    "ebbtide_gpu_sm_clock_hertz": Family(
        "gauge", "Clock of the GPU's processors.", _DEVICE
    ),
}

# Name of a family, values of its labels, and its values, by `SUFFIXES`; those that are
# None are not known.
_Sample = tuple[str, tuple[str, ...], *tuple[float | None, ...]]


class LiveTraceCollector(Collector):
    """The metrics of a trace that is being recorded, or of a finished one. Every scrape
    reads what is new."""

    def __init__(self, path: Path) -> None:
        self._live = LiveTrace(path)
        # Several scrapes may come at once.
        self._lock = threading.Lock()

    def describe(self) -> Iterable[core.Metric]:
        """Return all metrics without values.

        A scrape can ask for some of them (`?name[]=...`).
        """
        return [
            core.Metric(name, family.text, family.kind)
            for name, family in FAMILIES.items()
        ]

    def collect(self) -> Iterator[core.Metric]:
        """Yield the metrics that have values. A trace that cannot be read has only its
        name."""
        with self._lock:
            samples = list(self._samples())
        metrics = {metric.name: metric for metric in self.describe()}
        for name, labels, *values in samples:
            family = FAMILIES[name]
            for suffix, value in zip(SUFFIXES[family.kind], values, strict=True):
                quantile = (
                    {"quantile": "0.5"}
                    if family.kind == "summary" and not suffix
                    else {}
                )
                if value is not None:
                    named = dict(zip(family.labels, labels, strict=True))
                    metrics[name].add_sample(name + suffix, named | quantile, value)
        yield from (metric for metric in metrics.values() if metric.samples)

    def _samples(self) -> Iterator[_Sample]:
        yield (
            "ebbtide_recording",
            (self._live.path.name, socket.gethostname(), ebbtide.__version__),
            1,
        )
        try:
            deadline_s = time.monotonic() + _READ_S
            self._live.poll()
            while self._live.behind and time.monotonic() < deadline_s:
                self._live.poll()
            ranks = self._live.ranks
            yield "ebbtide_ranks", (), len(ranks)
            for rank in ranks[:MAX_RANKS]:
                yield from self._of_rank(rank)
        except UserError:
            return

    def _of_rank(self, rank: int) -> Iterator[_Sample]:
        figures, totals = self._live.rank(rank), self._live.totals(rank)
        own, device = (str(rank),), (str(rank), figures.device or "")
        median_s = {part: ms / 1e3 for part, ms in figures.median_ms.items()}
        yield "ebbtide_rank_recording", own, figures.state == "recording"
        yield "ebbtide_iterations", own, totals.iterations
        if totals.iterations:
            seconds = totals.iteration_s, totals.iterations, median_s.get("iteration")
            yield "ebbtide_iteration_seconds", own, *seconds
        for phase, total_s in totals.phase_s.items():
            yield (
                "ebbtide_phase_seconds",
                (*own, phase),
                total_s,
                totals.phase_iterations[phase],
                median_s.get(phase),
            )
        yield from self._memory(rank, device, figures.memory)
        for direction, moved in totals.link_bytes.items():
            yield "ebbtide_link_bytes", (*device, direction), moved
        for link in [*figures.link.values()][:1]:
            yield "ebbtide_link_peak_bytes_per_second", device, link.peak_bytes_per_s
        for column, (name, factor) in _GPU.items():
            if column in figures.gpu:
                yield name, device, figures.gpu[column] * factor

    def _memory(
        self, rank: int, device: tuple[str, str], memory: LiveMemory | None
    ) -> Iterator[_Sample]:
        trace = self._live.trace
        if trace is not None:
            for pool in sorted(
                set(MEMORY_POOLS) & set(trace.labels(rank, "memory", "pool"))
            ):
                sizes = memory_timeline(trace, rank, pool)[1]
                if len(sizes):
                    yield "ebbtide_memory_bytes", (*device, pool), int(sizes[-1])
        if memory is not None:
            yield "ebbtide_memory_capacity_bytes", device, memory.capacity_bytes
            yield "ebbtide_free_bytes", device, memory.free_bytes
            for phase in ITERATION_PARTS:
                yield (
                    "ebbtide_phase_peak_bytes",
                    (*device, phase),
                    memory.peak_bytes.get(phase),
                )
                yield (
                    "ebbtide_phase_free_bytes",
                    (*device, phase),
                    memory.min_free_bytes.get(phase),
                )


_LOCALHOST = "127.0.0.1"
_MAX_PORT = 65_535


class Address(NamedTuple):
    """An address to listen on; port 0: any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return (
            f"[{self.host}]:{self.port}"
            if ":" in self.host
            else f"{self.host}:{self.port}"
        )


def parse_address(text: str) -> Address:
    """Parse `9400`, `HOST:9400` or `[::1]:9400`; without a host it is 127.0.0.1. Raises
    ValueError for others."""
    host, _, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if port.isascii() and port.isdigit() else -1
    if (
        not 0 <= number <= _MAX_PORT
        or (":" in bare and bare == host)
        or (":" in text and not bare)
    ):
        raise ValueError(
            f"{text!r} is not a port (0 to {_MAX_PORT}) or HOST:PORT, like 9400 or "
            "0.0.0.0:9400"
        )
    return Address(bare or _LOCALHOST, number)


class _Handler(MetricsHandler):
    # Of a client that sends nothing.
    timeout = 10


class _Server(ThreadingHTTPServer):
    """Listens from its creation on, and answers each request in a thread."""

    def __init__(self, address: Address) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][
            0
        ]
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a search for the host's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the standard error belongs to the job."""


def serve_metrics(text: str) -> MetricsServer:
    """Listen on `9400` or `HOST:9400`. Raises ValueError for anything else, UserError
    if it cannot."""
    return MetricsServer(parse_address(text))


class MetricsServer:
    """Serves the metrics of one trace from threads of this process. It listens from its
    creation on, else raises UserError, and answers from `start` on, which a fork
    between the two may call."""

    def __init__(self, address: Address) -> None:
        try:
            self._server = _Server(address)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"cannot serve metrics on {address}: {reason}; choose another address, "
                "or port 0 for a free one"
            ) from None
        self._thread: threading.Thread | None = None
        self.url = f"http://{Address(address.host, self._server.server_port)}/metrics"

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._server.fileno()

    def start(self, trace: Path) -> None:
        """Serve the metrics of a trace, which need not exist yet."""
        self._thread = threading.Thread(
            target=self._serve,
            args=(trace.absolute(),),
            name="ebbtide metrics",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the server has been closed.

        A signal, such as of Ctrl-C, raises its exception here.
        """
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop to answer and to listen."""
        if self._thread is not None:
            self._server.shutdown()
        self._server.server_close()

    def _serve(self, trace: Path) -> None:
        registry = CollectorRegistry()
        registry.register(LiveTraceCollector(trace))
        self._server.RequestHandlerClass = _Handler.factory(registry)
        self._server.serve_forever()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
