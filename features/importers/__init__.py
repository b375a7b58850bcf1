"""Imports files of other tools into traces.

There is a package per source, behind one `Importer` protocol.
"""

from ebbtide.seams import Feature

FEATURE = Feature(
    "importers",
    {
        "commands": {"import": "command"},
        "importers": {
            "kineto": "kineto:IMPORTERS",
            "megatron": "megatron:IMPORTERS",
            "nsys": "nsys:IMPORTERS",
            "nvml-monitor": "nvml_monitor:IMPORTERS",
            "torch-memory": "torch_memory:IMPORTERS",
        },
        "names": {"profiler.importers.load.import_trace": "load:import_trace"},
    },
)
