"""Compare published figures of block swap with frozen weights with the policy
`block-swap`.

    python benchmarks/block_swap.py

`block_swap_figures.json` has the figures, each with its source, and the blocks of the
models. Memory is the difference between two numbers of blocks; times start from the
published one without copies, or with the fewest.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from tables import percent, table

from ebbtide.features.layers.model import place
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset

FIGURES = json.loads(Path(__file__).with_name("block_swap_figures.json").read_text())
# Checkpointed blocks are computed twice in the forward's way, and once backwards, which
# takes twice as long.
_FORWARD_SHARE = 0.25
_ADAPTERS = 1e5


def workload(layers: dict[str, float], width: float, base_s: float) -> Workload:
    """Return a job of equal layers whose compute takes `base_s`, with small
    adapters."""
    count = round(layers["count"])
    layer = {
        "params": _ADAPTERS,
        "frozen_bytes": layers["params"] * width,
        "forward_s": _FORWARD_SHARE * base_s / count,
        "backward_s": (1 - _FORWARD_SHARE) * base_s / count,
        "activation_bytes": 0.0,
    }
    values = {
        "params": _ADAPTERS * count,
        "forward_s": _FORWARD_SHARE * base_s,
        "backward_s": (1 - _FORWARD_SHARE) * base_s,
        "gpu_free_bytes": 1e12,
        "layers": [layer] * count,
        "clipping": False,
    }
    return workload_from(values, "published")


def swapped_of(lists: list[dict[str, float]], blocks: int) -> list[int]:
    """Return the blocks of each list that sd-scripts swaps: half are double ones, and
    each other one stands for two single ones."""
    if len(lists) == 1:
        return [blocks]
    double = blocks // 2
    return [double, 2 * (blocks - double)]


def device_bytes(figure: dict[str, Any], blocks: int) -> float:
    """Return the device memory of the layers of a model with some blocks swapped."""
    lists = FIGURES["models"][figure["model"]]["lists"]
    total = 0.0
    only = figure.get("only")
    chosen = swapped_of(lists, blocks) if only is None else [blocks]
    for layers, swapped in zip(
        lists if only is None else [lists[only]], chosen, strict=True
    ):
        job = workload(layers, figure["bytes"], 10.0)
        on_host = min(swapped, round(layers["count"]) - 2)
        plan = make_plan(f"block-swap:{on_host}", job, preset("rtx3090"))
        layer_bytes = job.layers[0].frozen_bytes
        total += max(one.weights for one in place(job, plan.layers).layer_memory)
        total -= (swapped - on_host) * layer_bytes
    return total


def seconds(figure: dict[str, Any]) -> float:
    """Return the simulated iteration of a figure."""
    (layers,) = FIGURES["models"][figure["model"]]["lists"]
    job = workload(layers, figure["bytes"], figure["base_s"])
    machine = preset(figure["machine"]).for_ranks(1)
    plan = make_plan(figure["policy"], job, machine)
    return simulate(plan, place(job, plan.layers), machine).iteration_s


def main() -> None:
    rows, errors = [], []
    for figure in FIGURES["memory"]:
        saved = device_bytes(figure, figure["fewer"])
        saved -= device_bytes(figure, figure["more"])
        measured = figure["gb"]
        error = percent(saved / 1e9, measured)
        if not figure.get("cards"):
            errors.append(abs(saved / 1e9 / measured - 1))
        texts = f"{saved / 1e9:.2f}", f"{measured:.2f}", error, figure["source"]
        rows.append((f"{figure['model']}: {figure['what']}", *texts))
    table(("memory", "predicted GB", "published GB", "error", "source"), rows)
    print(f"without sizes of cards: median {100 * statistics.median(errors):.1f} %\n")
    rows, errors = [], []
    for figure in FIGURES["time"]:
        predicted, measured = seconds(figure), figure["published_s"]
        errors.append(abs(predicted / measured - 1))
        texts = f"{predicted:.2f}", f"{measured:g}", percent(predicted, measured)
        rows.append((f"{figure['model']}: {figure['what']}", *texts, figure["source"]))
    table(("time", "predicted s", "published s", "error", "source"), rows)
    print(f"median {100 * statistics.median(errors):.1f} %")


if __name__ == "__main__":
    main()
