"""Run an example on the CPU for eight updates, and print the largest sum of the bytes of
tensors that live.

    python -m benchmarks.example_runs.eager SCRIPT [ARGUMENT]...

It counts once the optimizer is there, so no
preparation of data. Tensors of the host, such as batches, count, too.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.example_runs.stand_ins import let_torchvision_load
from tests.features.dryrun.random_jobs import CountedStorages

# As many as two iterations of several optimizers have.
_UPDATES = 8


def main(script: Path) -> None:
    """Run a script, whose arguments are in `sys.argv`, up to its last update."""
    updates = []

    def end(*_: Any) -> None:
        updates.append(None)
        if len(updates) == _UPDATES:
            raise SystemExit

    register_optimizer_step_post_hook(end)
    let_torchvision_load()
    make = torch.optim.Optimizer.__init__

    def make_and_reset(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        count.peak_bytes = count.bytes

    torch.optim.Optimizer.__init__ = make_and_reset  # type: ignore[method-assign]
    sys.path.insert(0, str(script.parent))
    with CountedStorages() as count, suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    print(f"{count.peak_bytes:,} bytes in {len(updates)} updates", file=sys.stderr)


if __name__ == "__main__":
    del sys.argv[0]
    main(Path(sys.argv[0]).absolute())
