"""What all other steps import: what is missing or does not fit together shows in seconds."""

from __future__ import annotations

import importlib
import re
import tomllib

from step import ROOT, arguments, begin

# Names that differ from their distributions'.
MODULES = {"nvidia-ml-py": "pynvml"}
# Beyond ebbtide's own: DeepSpeed with what it takes, and what tests and one comparison need.
OTHERS = ("deepspeed", "pydantic", "hjson", "torchao.optim", "pytest", "pytest_timeout", "hypothesis")
# Installed for CUDA alone.
ON_GPU = ("triton", "torchao.optim")


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=\[ ]", line)[0] for line in needed]
    wrong: dict[str, str] = {}
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
            wrong[name] = repr(error)
    step.tell(wrong=wrong)
    step.check("everything can be imported", not wrong)
    for name, why in wrong.items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    main()
