"""Prepares the dry run of a recipe file, which its framework's own program runs."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.features.dryrun.jobs.frameworks import FRAMEWORKS
from ebbtide.features.dryrun.jobs.models import Recipe, Replacements
from ebbtide.features.dryrun.jobs.settings import PreparedJob, require, scratch_folder

# Floats as YAML 1.2 has them; PyYAML takes them as text.
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")


def prepare_recipe(path: Path, ranks: int) -> PreparedJob:
    """Find the framework of a recipe, and write a copy whose model and data a dry run
    can load."""
    text, recipe = _read(path)
    framework = next(
        (framework for framework in FRAMEWORKS if framework.matches(recipe)), None
    )
    if framework is None:
        keys = ", ".join(
            f"{framework.key} ({framework.name})" for framework in FRAMEWORKS
        )
        raise UserError(
            f"{path} is no recipe that ebbtide knows: it has none of the keys {keys}"
        )
    require(framework.package, f"{path}, a recipe of {framework.name},")
    program, *words = framework.command(path, text, recipe, ranks)
    with scratch_folder() as scratch:
        replacements = Replacements(scratch)
        try:
            framework.adapt(
                path,
                recipe,
                replacements,
                max(16, 4 * ranks * framework.samples(recipe)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is no recipe of {framework.name} that ebbtide can read: "
                f"{error!r}"
            ) from None
        file = path
        if replacements.lines:
            file = scratch / path.name
            file.write_text(json.dumps(recipe), encoding="utf-8")  # which is YAML, too
            os.environ["HF_DATASETS_CACHE"] = str(scratch / "cache")
    # The programs of this environment come first, as if it were activated: a framework
    # may start `accelerate`.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    line = f"{framework.name}: {shlex.join([program, *words, str(path)])}"
    return PreparedJob(
        [program, *words, str(file)], scratch, [line, *replacements.lines]
    )


def _read(path: Path) -> tuple[str, Recipe]:
    try:
        import yaml
    except ImportError:
        raise UserError(
            "a recipe needs PyYAML to be read: pip install pyyaml"
        ) from None
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", _FLOAT, list("-+0123456789")
    )
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.load(text, loader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(recipe, dict):
        raise UserError(f"{path} is no recipe: it has no keys")
    return text, recipe
