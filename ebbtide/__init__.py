"""ebbtide: where device memory and the PCIe link go while a model trains, and what to do with it."""

__version__ = "0.1.0"
