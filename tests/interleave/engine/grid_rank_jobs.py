"""Random jobs over the grid of options on several ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.conftest import examples
from tests.interleave.engine.grid.draw import draw_rank_job
from tests.interleave.engine.grid.judge import judge, quiet


def random_grid(rank: int, folder: Path, jobs: int = 4) -> dict[str, Any]:
    """Return the numbers of verdicts by kind of parallel model, and the jobs that are
    wrong on a rank."""
    quiet()
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(jobs):
        job = draw_rank_job(seed)
        verdict = judge(job)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (verdict.kind, verdict.detail))
        kinds = {kind for kind, _ in of_ranks}
        counts[f"{job.ranks} {verdict.kind}"] += 1
        if kinds not in ({"equal"}, {"refused"}):
            wrong.append(f"{of_ranks} {job}")
    return {"counts": dict(counts), "wrong": wrong}


def many_of_the_grid(rank: int, folder: Path) -> dict[str, Any]:
    return random_grid(rank, folder, examples(60))


JOBS = (random_grid,)
