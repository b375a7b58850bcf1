"""Compare the search for the choice of each layer with all choices, for random jobs of three to five layers.

    PYTHONPATH=. python benchmarks/layer_choices.py [--all]

Prints by number of layers: jobs that fit, those whose iteration is at most 5 % longer than with the best choice, and
the largest excess. The search may compare all choices of a small job, which `--all` lets it do. Takes half an hour.
"""

from __future__ import annotations

import argparse

from ebbtide.interleave.policies import layer_choice
from tests.interleave.policies.test_layers import compare_with_all_choices

JOBS = {3: 140, 4: 50, 5: 10}
CLOSE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="let the search compare all choices where they are few")
    if not parser.parse_args().all:
        layer_choice._EXACT_CHOICES = 0
    for layers, count in JOBS.items():
        losses = compare_with_all_choices(count, 100 + layers, layers)
        close = sum(loss <= CLOSE for loss in losses)
        print(f"{layers} layers: {len(losses)} jobs, {close} within 5 %, at most {100 * max(losses):.1f} %", flush=True)


if __name__ == "__main__":
    main()
