"""Update rules, one file each.

A rule says what a step does to a parameter, and the state that it needs.
"""

from importlib import import_module
from pkgutil import iter_modules

from ebbtide import seams
from ebbtide.interleave.engine.rules.rule import RULES, UpdateRule, find_rule

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
seams.load_all("rules")

__all__ = ["RULES", "UpdateRule", "find_rule"]
