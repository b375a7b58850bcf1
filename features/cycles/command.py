"""`ebbtide cycles`: what a job repeats around its iterations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ebbtide.cli.command import command
from ebbtide.cli.options import Force, Json, TraceFile, output_option, rank_option
from ebbtide.cli.printing import echo
from ebbtide.cli.reading import show_result

if TYPE_CHECKING:
    from ebbtide.features.cycles.cycles import Cycles
    from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class _Result:
    """The cycles of some ranks; None for a rank that has none."""

    of_ranks: dict[int, Cycles | None]

    def as_json(self) -> dict[str, Any]:
        from ebbtide.features.cycles.changes import advise

        present = [one for one in self.of_ranks.values() if one is not None]
        return {
            "cycles": [{**one.as_json(), **advise(one).as_json()} for one in present]
        }


@command("Explain", examples=("cycles run.ebb", "cycles run.ebb -o cycle.png"))
def cycles(
    trace: TraceFile,
    rank: Annotated[
        int | None, rank_option("the one with the longest cycles, all with --json")
    ] = None,
    output: Annotated[Path | None, output_option("CYCLE.png", "no picture")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Print what a job repeats around its iterations: time and memory of the parts of
    a cycle, moves of state, and what to change.

    Examples are rollout and updates of reinforcement learning, inner and outer steps,
    and alternating optimizers. The picture has memory over one cycle with the names of
    its parts."""
    from ebbtide.features.cycles.cycles import find_cycles, slowest_cycles
    from ebbtide.features.cycles.tables import cycles_view
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    if rank is not None:
        opened.rank(rank)
    slowest = slowest_cycles(opened) if rank is None else find_cycles(opened, rank)
    if output is not None:
        from ebbtide.features.cycles.picture import save_picture

        save_picture(opened, slowest, output, force)
        echo(f"picture: {output}")
    ranks = opened.ranks if rank is None else [rank]
    result = _Result({one: find_cycles(opened, one) for one in ranks})

    def view(of_trace: Trace, _: _Result) -> Any:
        return cycles_view(of_trace, slowest)

    show_result(opened, result, view, as_json, "windows {}")
