"""Conditions and texts of the rules on DeepSpeed."""

from ebbtide.analysis.findings.rule import Need
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.deepspeed.setup import DeepSpeedSetup


def setup_of(metrics: JobMetrics) -> DeepSpeedSetup | None:
    """Return the setup of a DeepSpeed job; None of other jobs."""
    return metrics.setup if isinstance(metrics.setup, DeepSpeedSetup) else None


def _is_swapped(metrics: JobMetrics) -> bool:
    setup = setup_of(metrics)
    return setup is not None and setup.offload_config.get("device") == "nvme"


DEEPSPEED = Need("a DeepSpeed job", lambda metrics: setup_of(metrics) is not None)
SUB_STEPS = Need(
    "sub-steps of DeepSpeed, with the update in the job's own process (`ebbtide "
    "profile` records them)",
    lambda metrics: metrics.sub_step("update") is not None,
)
SWAPPED = Need(
    "DeepSpeed's optimizer state on storage (offload_optimizer: nvme)",
    _is_swapped,
    ends_with_offload=True,
)
STORAGE_WAITS = Need(
    "waits for storage (`ebbtide profile` records those of DeepSpeed)",
    lambda metrics: any(use.wait_ms is not None for use in metrics.storage),
    ends_with_offload=True,
)
ENABLE_ENGINE = '`ebbtide.interleave.deepspeed.enable(policy="adaptive")`'
