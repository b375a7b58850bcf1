"""Imports the packages of all other steps, to find within seconds what is missing or incompatible."""

from __future__ import annotations

import importlib
import re
import tomllib

from step import ROOT, argument_parser, start

# Distribution -> module, where the names differ.
MODULES = {"nvidia-ml-py": "pynvml"}
# In addition to the dependencies of ebbtide: DeepSpeed with its dependencies, tests, and a comparison.
OTHERS = ("deepspeed", "pydantic", "hjson", "torchao.optim", "pytest", "pytest_timeout", "hypothesis")
# Only installed with CUDA.
ON_GPU = ("triton", "torchao.optim")


def main() -> None:
    step = start(argument_parser(__doc__).parse_args())
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=\[ ]", requirement)[0] for requirement in needed]
    errors: dict[str, str] = {}
    for name in [
        *(MODULES.get(name, name) for name in names),
        "ebbtide.interleave.engine.optimizer",
        *OTHERS,
        "triton",
    ]:
        if step.rehearse and name in ON_GPU:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = repr(error)
    step.add(wrong=errors)
    step.check("everything can be imported", not errors)
    for name, error_text in errors.items():
        print(f"{name}: {error_text}")


if __name__ == "__main__":
    main()
