"""Compiles DeepSpeed's CPU Adam, beside other steps: `table` waits for it where it
needs it."""

from __future__ import annotations

from step import argument_parser, build_extensions, start

LIMIT_S, REHEARSAL_LIMIT_S = 150.0, 600.0


def main() -> None:
    step = start(argument_parser(__doc__).parse_args())
    limit = REHEARSAL_LIMIT_S if step.rehearse else LIMIT_S
    result = build_extensions(min(limit, step.left_s() - 2))
    step.add(build=result)
    if "why" in result:
        raise SystemExit(f"DeepSpeed does not compile: {result['why']}")


if __name__ == "__main__":
    main()
