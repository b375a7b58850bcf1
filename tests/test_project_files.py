"""Files about the project itself (workflows, hooks, templates) parse, and agree with
pyproject.toml and Makefile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [
    path
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.stem != "config"
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(workflow)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows__run_actions_of_a_version_and_targets_that_exist(
    workflow: Path,
) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert "@" in step.get("uses", "@")
        assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= targets


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows__may_read_the_repository_alone_unless_a_job_says_otherwise(
    workflow: Path,
) -> None:
    assert parsed(workflow)["permissions"] == {"contents": "read"}
    jobs = parsed(workflow)["jobs"]
    assert {name for name, job in jobs.items() if "permissions" in job} <= {"publish"}


def test_ci__tests_the_versions_that_the_project_states() -> None:
    jobs = parsed(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"
    run = PROJECT["optional-dependencies"]["run"]
    (torch,) = (
        text.removeprefix("torch>=") for text in run if text.startswith("torch>")
    )
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == [f"{torch}.0", "newest"]


def test_hooks__are_the_checks_of_make_lint() -> None:
    recipe = MAKEFILE.split("\nlint:")[1].split("\n\n")[0]
    checks = {
        line.split("$(BIN)/")[1].removesuffix(" .")
        for line in recipe.splitlines()
        if "$(BIN)/" in line
    }
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = {
        hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude")
        for hook in repository["hooks"]
    }
    assert hooks == {check.removesuffix(" --check") for check in checks}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms__ask_something_that_must_be_answered(form: Path) -> None:
    content = parsed(form)
    assert {"name", "description", "body"} <= set(content)
    identifiers = [field["id"] for field in content["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert any(
        field.get("validations", {}).get("required") for field in content["body"]
    )
    assert {field["type"] for field in content["body"]} <= {
        "textarea",
        "input",
        "checkboxes",
        "dropdown",
        "markdown",
    }


def test_citation__has_what_its_format_requires() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert {"cff-version", "title", "message", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("page", ["README.md", "docs/what-has-run.md"])
def test_pages__state_the_accuracy_that_validation_measures(page: str) -> None:
    pattern = r"predict the updates of the others within ([\d.]+) %"
    measured = re.findall(pattern, (ROOT / "docs" / "validation.md").read_text())
    assert len(measured) == 1
    assert re.findall(pattern, (ROOT / page).read_text()) == measured
