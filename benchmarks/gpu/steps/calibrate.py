"""`ebbtide calibrate`, and how its check of the link's counters against known copies came out, source by source."""

from __future__ import annotations

import json
from typing import Any

from step import arguments, begin, ebbtide

SECONDS, TINY_SECONDS = 40, 3


def agrees(source: dict[str, Any]) -> bool:
    """Whether a source counts what was copied, within 10 % each way."""
    scales = [source[way]["scale"] for way in ("h2d", "d2h") if way in source]
    return len(scales) == 2 and all(scale is not None and 0.9 < scale < 1.1 for scale in scales)


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    seconds = str(TINY_SECONDS if step.rehearse else SECONDS)
    told = ebbtide("calibrate", "--seconds", seconds, "--force", "--json", "-o", step.out / "machine.json")
    machine = json.loads(told)
    rates = {key: value for key, value in machine.items() if isinstance(value, int | float)}
    step.tell(rates=rates, counters=machine.get("counters"), contention=machine.get("contention"))
    step.tell(notes=machine.get("notes"))
    sources = machine.get("counters")
    step.check(
        "a source of the link's use is right within 10 %", any(map(agrees, sources.values())) if sources else None
    )


if __name__ == "__main__":
    main()
