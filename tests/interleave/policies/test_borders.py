"""Text of policies is parsed where it comes in; everywhere else a policy is an
object."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Files that may name each function that parses text, with the text that comes in there.
BORDERS = {
    "Policy.parse": {"interleave/policies/registry.py": "all of it"},
    "as_policy": {
        "features/advise/choice.py": "policies that traces record",
        "features/advise/command.py": "`plan --policy`",
        "features/calibrate/fitting/samples.py": "policies that traces record",
        "features/run/command.py": "`run --policy`",
        "features/run/comparison/compare.py": "`compare --policy`, of a command",
        "features/run/driver/called_models.py": "options of a job's process",
        "features/run/driver/windows.py": "options of a job's process",
        "interleave/compare/compare.py": "`compare --policy`, and its function",
        "interleave/engine/options.py": "arguments of optimizers",
        "interleave/policies/__init__.py": "texts that policies register",
        "interleave/policies/registry.py": "arguments of `make_plan`",
        "interleave/replay/replay.py": "constants",
    },
    "as_policies": {
        "features/sweep/command.py": "`sweep --policy`",
        "features/sweep/task.py": "arguments of its function",
        "interleave/replay/inputs.py": "`replay --policy`",
        "interleave/replay/replay.py": "arguments of its function",
    },
    # For callers outside of the repository, who have text.
    "make_plan": {},
    # Advice chooses among plans, which have the text of their policy.
    "Policy.of_plan": {
        "features/advise/choice.py": "plans",
        "features/advise/lines/setups.py": "plans",
        "features/advise/lines/systems.py": "plans",
    },
}


def _names(code: str) -> set[str]:
    """Return the names and attributes of names in code, but for its imports."""
    nodes = [*ast.walk(ast.parse(code))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {
        ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)
    }


def test_policies__are_parsed_at_borders_alone() -> None:
    users: dict[str, set[str]] = {name: set() for name in BORDERS}
    folders = [
        ROOT / name
        for name in ("analysis", "features", "interleave", "profiler", "ebbtide/cli")
    ]
    files = [
        *(ROOT / "ebbtide").glob("*.py"),
        *(file for folder in folders for file in folder.rglob("*.py")),
    ]
    for file in files:
        code = file.read_text(encoding="utf-8")
        named = {name for name in BORDERS if name in code}
        for name in named and named & _names(code):
            users[name].add(file.relative_to(ROOT).as_posix())
    # Features may be deleted.
    present = {
        name: {file for file in places if (ROOT / file).is_file()}
        for name, places in BORDERS.items()
    }
    assert users == present
