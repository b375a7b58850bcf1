"""Updates of published runs that no fit has seen, against machines that are fitted to
other models.

    python benchmarks/held_out.py FOLDER

FOLDER holds logs of github.com/mauryaavinash95/deep-optimizer-states-results, found by
name. Updates on H100 are predicted by the preset `h100-80gb-sxm-published`, those on
A100 by `a100-40gb-published`, and those of A100 ranks that are not bound to cores by a
fit to the runs with one and two ranks of `traces/`. Backwards that wait for blocking
copies are predicted with the compute of the same job's runs with asynchronous copies.
Prints Markdown, see docs/validation.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from published import TRACES
from tables import percent, table

from ebbtide.errors import UserError
from ebbtide.features.calibrate.fitting.from_traces import fit
from ebbtide.features.calibrate.fitting.samples import FitSample, sample_of
from ebbtide.features.importers.importer import Hardware
from ebbtide.features.importers.load import import_trace
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import open_trace

NAME = re.compile(
    r"log-(?P<model>[\d.]+B)-tp(?P<tp>\d+)-dp(?P<dp>\d+)-.*-mbs(?P<batch>\d+)-ratio(?P<ratio>[\d.]+)-"
    r".*-flush_async(?P<asynchronous>\d)-opt_gaps(?P<stride>\d+)\.log$"
)
LINKS = {"H100": (5, 16), "A100": (4, 16)}


def card_of(text: str) -> str:
    """Return the card of a log: the A100 runs were made by another user than those on
    H100."""
    return "A100" if "/home/am6429" in text else "H100"


def unbound_machine() -> Machine:
    """Return the machine of the runs with one and two ranks on a host."""
    traces = [open_trace(path) for path in sorted(TRACES.glob("a100-ranks*"))]
    return fit([sample_of(trace) for trace in traces]).machine


def sample_of_log(path: Path, card: str, folder: Path) -> FitSample:
    trace = import_trace(
        [path], folder / f"{path.stem}.ebb", hardware=Hardware(link=LINKS[card])
    )
    return sample_of(trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    machines = {
        "H100": preset("h100-80gb-sxm-published"),
        "A100": preset("a100-40gb-published"),
    }
    unbound = unbound_machine()
    rows, errors = [], defaultdict(list)
    blocking, compute_s = [], defaultdict(list)
    with tempfile.TemporaryDirectory() as work:
        for number, path in enumerate(sorted(args.folder.rglob("log-*.log"))):
            match, text = NAME.search(path.name), path.read_text(errors="replace")
            if match is None:
                continue
            card = card_of(text)
            run = (
                f"{path.parent.name[:30]}/{match['model']} dp{match['dp']} "
                f"tp{match['tp']} b{match['batch']}"
            )
            run += f" r{match['ratio']} a{match['asynchronous']} k{match['stride']}"
            (folder := Path(work) / str(number)).mkdir()
            try:
                sample = sample_of_log(path, card, folder)
            except UserError as error:
                rows.append([run, card, "-", "-", f"left out: {error!s:.60}"])
                continue
            is_bound = "numactl" in text
            machine = machines[card] if is_bound or card == "H100" else unbound
            predicted = sample.simulate(machine).update_s
            group = (
                f"{card} {match['model']} {sample.ranks} ranks a host "
                f"{'bound' if is_bound else 'not bound'}"
            )
            errors[group].append(predicted / sample.update_s - 1)
            rows.append(
                [
                    run,
                    group,
                    f"{sample.update_s:.3f}",
                    f"{predicted:.3f}",
                    percent(predicted, sample.update_s),
                ]
            )
            job = f"{group}, ratio {float(match['ratio']):g}, batch {match['batch']}"
            if sample.backward_s is not None and is_bound:
                blocking.append((job, sample, machine))
            elif sample.backward_s is None:
                compute_s[job].append(sample.workload.backward_s)
    table(["run", "machine", "update, s", "predicted", "error"], rows)
    table(
        ["runs", "count", "mean error", "largest"],
        [
            [
                group,
                str(len(values)),
                f"{100 * statistics.mean(map(abs, values)):.1f} %",
                f"{100 * max(values, key=abs):+.1f} %",
            ]
            for group, values in sorted(errors.items())
        ],
    )
    table(
        [
            "job",
            "blocking backward, s",
            "asynchronous, s",
            "wait, s/Gparam",
            "predicted, s",
            "error",
        ],
        [
            blocking_row(job, sample, machine, compute_s[job])
            for job, sample, machine in blocking
            if compute_s[job]
        ],
    )


def blocking_row(
    job: str, sample: FitSample, machine: Machine, compute_s: list[float]
) -> list[str]:
    """Return a row of a backward that waits for its copies, predicted from backwards of
    the same job that do not."""
    alone_s, measured_s = statistics.median(compute_s), sample.backward_s or 0.0
    schedule = replace(
        sample, workload=replace(sample.workload, backward_s=alone_s)
    ).simulate(machine)
    copied = sum(op.params for op in schedule.plan.ops if op.is_blocking)
    return [
        job,
        f"{measured_s:.3f}",
        f"{alone_s:.3f}",
        f"{(measured_s - alone_s) / copied * 1e9:.2f}",
        f"{schedule.backward_s:.3f}",
        percent(schedule.backward_s, measured_s),
    ]


if __name__ == "__main__":
    main()
