"""Make the traces of this folder again from the files that others published.

    python traces/convert.py FOLDER [-o traces]

FOLDER is searched for the files by name. It holds copies of the two repositories that
`README.md` names. A trace keeps figures: times, sizes, rates, configuration, counts of
parameters. The command line of the run is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbtide.features.importers.importer import Hardware
from ebbtide.profiler.importers.load import import_trace
from ebbtide.profiler.trace.files import write_meta

RESULTS = "github.com/mauryaavinash95/deep-optimizer-states-results"
ANALYSIS = "github.com/facebookresearch/HolisticTraceAnalysis"
H100 = Hardware(link=(5, 16))
A100 = Hardware(capacity_bytes=40 * 2**30, link=(4, 16))


@dataclass(frozen=True)
class PublishedRun:
    """One trace to make. files: name inside the trace's metadata -> name of the
    published file. device: the card's name as the publication states it, where the
    files do not tell it."""

    name: str
    origin: str
    files: dict[str, str]
    hardware: Hardware | None = None
    device: str | None = None


def published_runs() -> Iterator[PublishedRun]:
    """All runs that have a trace in this folder."""
    for ratio in ("1.0", "0.8", "0.5"):
        for kind, options in {
            "blocking": "prefetch0-flush_async0-opt_gaps0",
            "async": "prefetch0-flush_async1-opt_gaps0",
            "interleaved-2": "prefetch1-flush_async1-opt_gaps2",
        }.items():
            stem = f"log-20B-tp1-dp4-l40-h5120-a64-sl2048-gbs4-mbs1-ratio{ratio}-subg100000000-{options}"
            name = (
                f"h100-20b-{kind}"
                if ratio == "1.0"
                else f"h100-20b-ratio{ratio}-{kind}"
            )
            files = {"train.log": f"{stem}.log", "monitor.csv": f"{stem}-monitor.csv"}
            yield PublishedRun(name, RESULTS, files, H100, "NVIDIA H100 80GB")
    kinds = {
        "blocking": "prefetch0-flush_async0-opt_gaps0",
        "async": "prefetch0-flush_async1-opt_gaps0",
    }
    kinds |= {
        f"interleaved-{stride}": f"prefetch1-flush_async1-opt_gaps{stride}"
        for stride in (2, 3, 4, 6, 8, 10)
    }
    for kind, options in kinds.items():
        stem = f"log-13B-tp1-dp4-l40-h5120-a40-sl2048-gbs4-mbs1-ratio1-subg100000000-{options}"
        yield PublishedRun(
            f"a100-13b-{kind}",
            RESULTS,
            {"train.log": f"{stem}.log"},
            A100,
            "NVIDIA A100 40GB",
        )
    # The one-rank run at stride 2 was ended before its first step.
    for ranks, strides in ((1, (0, 6)), (2, (0, 2, 6))):
        for stride in strides:
            stem = (
                f"log-13B-tp1-dp{ranks}-l40-h5120-a40-sl2048-gbs{4 * ranks}-mbs4-ratio1-subg100000000-"
                f"prefetch{min(stride, 1)}-flush_async1-opt_gaps{stride}"
            )
            kind = f"interleaved-{stride}" if stride else "async"
            files = {"train.log": f"{stem}.log"}
            yield PublishedRun(
                f"a100-ranks{ranks}-{kind}", RESULTS, files, A100, "NVIDIA A100 40GB"
            )
    yield PublishedRun(
        "a100-torch-profiler", ANALYSIS, {"control.json.gz": "control.json.gz"}
    )


def convert(run: PublishedRun, folder: Path, output: Path) -> Path:
    """Write the trace of one run, and return its path. Raises FileNotFoundError where
    one of its files is missing."""
    path = output / f"{run.name}.ebb"
    with tempfile.TemporaryDirectory() as scratch:
        sources = []
        for short_name, file_name in run.files.items():
            # Notes name the files: short names read better, and the full ones stand in
            # `provenance`.
            sources.append(Path(scratch) / short_name)
            sources[-1].symlink_to(_find(folder, file_name))
        trace = import_trace(sources, path, force=True, hardware=run.hardware)
    meta = dict(trace.raw_meta)
    meta.pop("command", None)
    meta["provenance"] = {
        "origin": run.origin,
        "files": list(run.files.values()),
        "converted_by": "traces/convert.py",
    }
    for rank in meta["ranks"]:
        for device in rank["devices"]:
            if run.device is not None:
                device["name"] = run.device
    write_meta(path, meta)
    return path


def _find(folder: Path, name: str) -> Path:
    files = sorted(folder.rglob(name))
    if not files:
        raise FileNotFoundError(f"{folder} has no file {name}")
    return files[0].resolve()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the published files lie")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(__file__).parent,
        help="where to write the traces",
    )
    arguments = parser.parse_args()
    for run in published_runs():
        print(convert(run, arguments.folder, arguments.output))


if __name__ == "__main__":
    main()
