"""Measure how long a dry run of a large model takes, and how much memory of the host.

    python benchmarks/dry_run.py [--layers 40] [--width 5120]
    python benchmarks/dry_run.py --script nanoGPT/train.py --dataset=openwebtext --device=cuda
    python benchmarks/dry_run.py --script transformers/examples/pytorch/language-modeling/run_clm.py --do_train

Without a script the job is a decoder in bfloat16 with torch's AdamW, batch 1 and
context 2048, for two iterations; the default size has 12.9e9 parameters. A script is
run unmodified in its folder, with the arguments behind it, and its files are checked to
be the same afterwards. Prints Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import machine_line, table

from ebbtide.profiler.trace import open_trace

JOB = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, CONTEXT, VOCABULARY = int(sys.argv[1]), int(sys.argv[2]), 2048, 32_000

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, WIDTH // 128, 128).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

model = Decoder().to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    tokens = torch.randint(0, VOCABULARY, (1, CONTEXT + 1)).cuda()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument(
        "--script", nargs=argparse.REMAINDER, help="a script of yours and its arguments"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.py"), Path(folder, "run.ebb")
        job.write_text(JOB, encoding="utf-8")
        command = [str(job), str(args.layers), str(args.width)]
        if args.script:
            job = Path(args.script[0]).resolve()
            command = [job.name, *args.script[1:]]
        words = [
            sys.executable,
            "-m",
            "ebbtide",
            "dry-run",
            "-o",
            str(output),
            "--",
            "python",
            *command,
        ]
        before = digests(job.parent)
        start_s = time.perf_counter()
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=job.parent
        ) as process:
            messages = process.stderr.read().decode() if process.stderr else ""
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        elapsed_s = time.perf_counter() - start_s
        if process.returncode:
            raise SystemExit(
                f"the dry run failed with status {process.returncode}:\n{messages}"
            )
        after = digests(job.parent)
        if args.script and after != before:
            changed = sorted(
                name
                for name in {*before, *after}
                if before.get(name) != after.get(name)
            )
            raise SystemExit(f"the dry run changed files: {', '.join(changed)}")
        trace = open_trace(output)
        peaks = trace.memory(0).groupby("pool", observed=True)["bytes"].max()
        row = [
            f"{(trace.rank(0).model.params or 0) / 1e9:.2f}",
            f"{peaks['requested'] / 1e9:.1f}",
            f"{peaks['reserved'] / 1e9:.1f}",
            f"{elapsed_s:.0f}",
            f"{usage.ru_utime + usage.ru_stime:.0f}",
            f"{usage.ru_maxrss * 1024 / 1e9:.2f}",
        ]
    header = [
        "parameters, G",
        "peak requested, GB",
        "peak reserved, GB",
        "time, s",
        "CPU time, s",
        "host memory, GB",
    ]
    print(f"{machine_line()}\n")
    table(header, [row])


if __name__ == "__main__":
    main()
