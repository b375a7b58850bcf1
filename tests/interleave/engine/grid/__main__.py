"""Judge random jobs: python -m tests.interleave.engine.grid FIRST_SEED [JOBS]"""

import sys

import pytest

from tests.interleave.engine.compile_once import compile_once
from tests.interleave.engine.grid.draw import draw_job
from tests.interleave.engine.grid.judge import judge_all, quiet
from tests.interleave.quick_plans import plan_quickly


def main(first: int = 0, jobs: int = 1) -> None:
    quiet()
    compile_once()
    plan_quickly(pytest.MonkeyPatch())
    judge_all(map(draw_job, range(first, first + jobs)), prints_each=jobs == 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
