"""The rules of CONTRIBUTING.md that a program can check: docstrings, names, public
classes, import cycles."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ebbtide", "profiler", "analysis", "interleave", "features")
FORBIDDEN_NAMES = {
    "found",
    "told",
    "held",
    "known",
    "way",
    "piece",
    "company",
    "beat",
    "door",
    "odd",
}
FORBIDDEN_OPENINGS = ("What ", "Of ", "Where ", "How ", "Whose ")
# Classes that each version of torch has one of.
ROLES = {"Backend"}


def sources(*folders: str) -> list[Path]:
    """Every Python file of the folders; `ebbtide/` without its links to the other
    packages."""
    files: list[Path] = []
    for folder in folders:
        files += [
            path
            for path in sorted((ROOT / folder).rglob("*.py"))
            if not _through_link(path)
        ]
    return files


def _through_link(path: Path) -> bool:
    return any(
        parent.is_symlink()
        for parent in path.parents
        if parent != ROOT and ROOT in parent.parents
    )


def trees(*folders: str, pattern: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Yield the path, from the root of the repository, and the syntax tree of each file
    whose text has the pattern."""
    for path in sources(*folders):
        if re.search(pattern, path.read_text(encoding="utf-8"), re.IGNORECASE):
            yield str(path.relative_to(ROOT)), _parse(path)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that a module defines or assigns, and its line number."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno


def test_names__none_is_a_word_that_says_nothing() -> None:
    for folder in [*PACKAGES, "tests", "benchmarks", "examples", "docs", "traces"]:
        breaches = [
            f"{path}:{line}: {name}"
            for path, tree in trees(
                folder, pattern=rf"\b_*({'|'.join(FORBIDDEN_NAMES)})_*\b"
            )
            for name, line in names(tree)
            if name.strip("_").lower() in FORBIDDEN_NAMES
        ]
        assert breaches == []


def test_docstrings__begin_with_what_the_thing_is_or_does() -> None:
    for folder in [*PACKAGES, "tests", "benchmarks", "examples", "docs", "traces"]:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        breaches = [
            f"{path}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}"
            for path, tree in trees(
                folder, pattern=rf"[\"'][\s\\]*({'|'.join(FORBIDDEN_OPENINGS)})"
            )
            for node in ast.walk(tree)
            if isinstance(node, documented)
            and (docstring := ast.get_docstring(node))
            and docstring.startswith(FORBIDDEN_OPENINGS)
        ]
        assert breaches == []


def test_public_classes__each_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees(*PACKAGES):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    repeated = {name for name, paths in places.items() if len(paths) > 1}
    assert repeated <= ROLES


def test_folders__each_says_in_its_docstring_what_it_holds() -> None:
    silent = [
        path
        for path, tree in trees(*PACKAGES)
        if path.endswith("/__init__.py") and not ast.get_docstring(tree)
    ]
    assert silent == []


@cache
def module_imports() -> dict[str, set[str]]:
    """Return the modules of ebbtide that each module imports, at the top or inside
    functions."""
    modules: dict[str, tuple[bool, ast.Module]] = {}
    for path, tree in trees(*PACKAGES):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        full_name = name if name.split(".")[0] == "ebbtide" else f"ebbtide.{name}"
        modules[full_name] = path.endswith("__init__.py"), tree
    imports: dict[str, set[str]] = {}
    for module, (is_package, tree) in modules.items():
        imports[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(module, is_package, node)
                targets = {
                    f"{base}.{alias.name}"
                    if f"{base}.{alias.name}" in modules
                    else base
                    for alias in node.names
                }
            else:
                continue
            imports[module] |= {
                target for target in targets if target in modules and target != module
            }
    return imports


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + (1 if is_package else 0)]
    return ".".join([*parents, node.module] if node.module else parents)


def test_imports__go_in_no_circle_between_the_entries_of_any_folder() -> None:
    imports = module_imports()
    edges: dict[str, set[str]] = defaultdict(set)
    for module, targets in imports.items():
        for target in targets:
            one, other = module.split("."), target.split(".")
            # The two entries of the deepest folder that both are in.
            shared = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                None,
            )
            # The core names public objects of features, and imports them when asked.
            is_lazy = one[1:2] != ["features"] and other[1:2] == ["features"]
            if shared is not None and not is_lazy:
                edges[".".join(one[: shared + 1])].add(".".join(other[: shared + 1]))
    assert [entry for entry in sorted(edges) if entry in _reachable(edges, entry)] == []


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    open_entries = [start]
    while open_entries:
        for target in edges.get(open_entries.pop(), set()) - reached:
            reached.add(target)
            open_entries.append(target)
    return reached


@pytest.mark.parametrize("package", ["analysis", "interleave"])
def test_packages__have_few_entries_and_few_imports_between_them(package: str) -> None:
    prefix = f"ebbtide.{package}."
    arrows = {
        (
            module.removeprefix(prefix).split(".")[0],
            target.removeprefix(prefix).split(".")[0],
        )
        for module, targets in module_imports().items()
        for target in targets
        if module.startswith(prefix) and target.startswith(prefix)
    }
    entries = [
        path
        for path in (ROOT / package).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    assert len(entries) <= 13
    assert len({(one, other) for one, other in arrows if one != other}) <= 40
