"""Judge random jobs: python -m tests.interleave.engine.grid FIRST_SEED [JOBS]"""

import sys
import time

import pytest

from tests.interleave.engine.compile_once import compile_once
from tests.interleave.engine.grid.draw import draw_job
from tests.interleave.engine.grid.judge import Tally, judge, quiet
from tests.interleave.quick_plans import plan_quickly


def main(first: int = 0, jobs: int = 1) -> None:
    quiet()
    compile_once()
    plan_quickly(pytest.MonkeyPatch())
    tally, start_s, cpu_s = Tally(), time.perf_counter(), time.process_time()
    for seed in range(first, first + jobs):
        job = draw_job(seed)
        verdict = judge(job)
        if jobs == 1:
            print(job, verdict.kind, verdict.detail, sep="\n")
        tally.add(job, verdict)
        if not verdict.is_right:
            print(tally.failures[-1], flush=True)
    print(dict(tally.verdicts), f"{time.perf_counter() - start_s:.0f} s, CPU {time.process_time() - cpu_s:.0f} s")
    for message, count in tally.refusals.most_common():
        print(count, message)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
