"""Measures the rates of a machine, or fits them from traces."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "calibrate",
    {
        "commands": {"calibrate": "command"},
        "services": {
            "calibrate": "run:calibrate_alone",
            "measure-cpu": "cpu_machine:measure_cpu",
        },
    },
)
