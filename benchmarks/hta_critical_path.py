"""Count what HolisticTraceAnalysis (HTA) leaves out of the length of its critical path.

    python benchmarks/hta_critical_path.py --hta-python PATH FILE:ANNOTATION:INSTANCE...

PATH is the Python of an environment with HTA. Each window is a torch.profiler trace, an
annotation (`ProfilerStep`; empty for the whole file) and its number. HTA gives some
edges of its graph no weight. The script goes along HTA's own path and sums the time of
those edges: between outermost operators (DEPENDENCY), within calls that wait, and from
work to a call that waits for it (SYNC_DEPENDENCY). Prints Markdown, in ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess

from tables import table

HTA = """
import json, logging, os, sys, warnings
logging.disable(logging.CRITICAL); warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
file, annotation, instance = sys.argv[1].rsplit(":", 2)
analysis = TraceAnalysis({0: os.path.abspath(file)}, trace_dir="/", include_last_profiler_step=True)
graph, _ = analysis.critical_path_analysis(0, annotation, int(instance) if instance else None)
path = graph.critical_path_nodes
figures = {"span": graph.node_list[path[-1]].ts - graph.node_list[path[0]].ts, "length": 0}
for begin, end in zip(path, path[1:]):
    edge, first, last = graph.edges[begin, end]["object"], graph.node_list[begin], graph.node_list[end]
    between = edge.type.name == "DEPENDENCY"
    assert edge.weight == last.ts - first.ts or between or edge.type.name == "SYNC_DEPENDENCY" or first.is_blocking
    kind = "between" if between else "waits"
    figures[kind] = figures.get(kind, 0) + last.ts - first.ts - edge.weight
    figures["length"] += edge.weight
    if between:
        figures["longest"] = max(figures.get("longest", 0), last.ts - first.ts)
print(json.dumps({key: float(value) / 1e3 for key, value in figures.items()}))
"""
COLUMNS = {
    "length": "HTA, ms",
    "span": "window, ms",
    "between": "between outermost operators",
    "longest": "longest of these",
    "waits": "in and to calls that wait",
}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("windows", nargs="+", metavar="FILE:ANNOTATION:INSTANCE")
    flags.add_argument(
        "--hta-python", required=True, help="Python of an environment with HTA"
    )
    args = flags.parse_args()
    rows = []
    for window in args.windows:
        run = subprocess.run(
            [args.hta_python, "-c", HTA, window],
            capture_output=True,
            text=True,
            check=True,
        )
        figures = json.loads(run.stdout.splitlines()[-1])
        rows.append(
            [
                f"`{window.rpartition('/')[2]}`",
                *(f"{figures.get(key, 0.0):,.3f}" for key in COLUMNS),
            ]
        )
    table(["window", *COLUMNS.values()], rows)


if __name__ == "__main__":
    main()
