"""The backends of versions of torch, and the sink that knows none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ebbtide.features.dryrun
from ebbtide.features.dryrun.backends import BACKENDS

FOLDER = Path(ebbtide.features.dryrun.__file__).parent
ROOT = Path(__file__).resolve().parents[3]
# Environments of builds with CUDA.
CUDA_BUILDS = ("2.11.0", "2.13.0")
# Convolutions, attention, a recurrent layer, autocast with a scaler, streams and
# indices that depend on values.
JOB = """
import json
import torch
from torch import nn
from torch.nn import functional as F
from ebbtide.features.dryrun.session import DryRun, DryRunOptions

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.embedding, self.recurrent = nn.Embedding(5000, 256), nn.LSTM(256, 256)
        self.attention, self.head = nn.Linear(256, 768), nn.Linear(256, 5000)

    def forward(self, image, tokens):
        features = F.relu(self.norm(self.convolution(image))).mean((2, 3))
        parts = self.attention(self.recurrent(self.embedding(tokens))[0]).chunk(3, -1)
        heads = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2)), features.var()

with DryRun(DryRunOptions(iterations=2)) as run:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler, side = torch.amp.GradScaler("cuda"), torch.cuda.Stream()
    for _ in range(3):
        tokens = torch.randint(0, 5000, (4, 64)).pin_memory().to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            logits, spread = model(torch.randn(4, 3, 32, 32, device="cuda"), tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + spread
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.cuda.stream(side):
            logits[tokens > 3].sum()
        torch.cuda.current_stream().wait_stream(side)
memory, clock = run.memory, run.clock
print(json.dumps({
    "torch": torch.__version__,
    "peak_bytes": memory.most_bytes,
    "reserved_bytes": memory.most_reserved_bytes,
    "blocks": len(memory.blocks),
    "kernels": len(clock.kernels),
    "copies": len(clock.copies),
    "phases": [phase.phase for phase in run.tracker.phases],
}))
"""


def modules_without_torch() -> list[str]:
    """Return the names of the feature's modules outside of its backends."""
    files = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")]
    return [
        ".".join(("ebbtide.features.dryrun", *path.with_suffix("").parts))
        for path in files
        if path.parts[0] not in BACKENDS.values() and path.name != "__main__.py"
    ]


def test_modules_beside_the_backends__need_no_torch() -> None:
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {modules_without_torch()}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("version", CUDA_BUILDS)
def test_backends__predict_the_same_with_builds_for_cuda(version: str) -> None:
    python = ROOT / ".venv-cuda" / version / "bin/python"
    if not python.exists():
        pytest.skip(f"{python} is not here: make {python.parents[1]}/installed")
    figures = [figures_of(each) for each in (Path(sys.executable), python)]
    assert figures[0]["torch"] != figures[1]["torch"]
    for each in figures:
        del each["torch"]
    assert figures[0] == figures[1]
    assert figures[0]["peak_bytes"] > 70_000_000


def figures_of(python: Path) -> dict[str, Any]:
    """Run the job with an interpreter, and return what was counted."""
    run = subprocess.run(
        [python, "-c", JOB],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(run.stdout)
    return figures
