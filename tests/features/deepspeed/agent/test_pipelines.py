"""DeepSpeed's pipelines, which interleave the forwards and backwards of micro-batches:
a real one, on two processes."""

from __future__ import annotations

import pytest

from tests.profiler.agent.test_pipelines import LAUNCHER
from tests.profiler.agent.timed_jobs import PRELUDE, STEPS, Record

DEEPSPEED = (
    PRELUDE
    + """
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
deepspeed.init_distributed("gloo")
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    def forward(self, x):
        return self.net(x)
net = PipelineModule([LayerSpec(Part) for _ in range(2)], num_stages=2, loss_fn=nn.MSELoss())
engine, _, _, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(),
    config={"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
)
def items():
    while True:
        yield torch.randn(64, 256), torch.randn(64, 256)
stream = items()
for _ in range(STEPS):
    engine.train_batch(stream)
"""
)


@pytest.mark.slow
def test_profile__records_each_micro_batch_of_deepspeeds_pipeline(
    record: Record,
) -> None:
    recorded = record(DEEPSPEED, launcher=LAUNCHER)
    assert recorded.run.returncode == 0, recorded.run.stderr
    for rank in (0, 1):
        phases = recorded.trace.phases(rank)
        assert phases["iteration"].nunique() == STEPS
        rows = phases[phases["phase"] != "update"]
        backwards = rows[rows["phase"] == "backward"]
        assert list(backwards["micro_step"]) == [0, 1, 2, 3] * STEPS
        # The loss of the last stage is a module: a forward of the same micro-batch.
        first_forwards = rows[rows["phase"] == "forward"].drop_duplicates(
            ["iteration", "micro_step"]
        )
        assert list(first_forwards["micro_step"]) == [0, 1, 2, 3] * STEPS
        pairs = first_forwards.merge(
            backwards, on=["iteration", "micro_step"], suffixes=("", "_backward")
        )
        assert (pairs["end_ns"] <= pairs["start_ns_backward"]).all()
