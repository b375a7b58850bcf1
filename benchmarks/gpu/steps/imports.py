"""Imports the packages of all other steps, and fails with the names of those that are
missing or incompatible."""

from __future__ import annotations

import importlib
import sys

from step import ROOT, argument_parser, start

sys.path.append(str(ROOT / "benchmarks" / "gpu"))
from packages import importable

# Only installed with CUDA.
ON_GPU = ("triton", "torchao.optim")


def main() -> None:
    step = start(argument_parser(__doc__).parse_args())
    errors: dict[str, str] = {}
    for name in [*importable(), "ebbtide.interleave.engine.optimizer"]:
        if step.rehearse and name in ON_GPU:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = repr(error)
    step.add(wrong=errors)
    for name, error_text in errors.items():
        print(f"{name}: {error_text}")
    if errors:
        raise SystemExit(f"cannot be imported: {', '.join(errors)}")


if __name__ == "__main__":
    main()
