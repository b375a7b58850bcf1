"""Makes a trace of a training job that is not run on a device: its CUDA tensors are
fake."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "dryrun",
    {
        "commands": {"dry-run": "command"},
        "names": {
            "profiler.DryRun": "session:DryRun",
            "profiler.DryRunOptions": "session:DryRunOptions",
            "profiler.trace_of_run": "trace_of_run:trace_of_run",
        },
        "sources": {"predicted": "source:COMMAND"},
    },
)
