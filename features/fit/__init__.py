"""Levers of memory: which changes make the job of a model fit a device."""

from ebbtide.seams import Feature

FEATURE = Feature("fit", {"services": {"fit": "answer"}}, needs=("advise", "dryrun"))
