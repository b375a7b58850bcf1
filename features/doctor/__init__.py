"""Checks a host before a job runs, and makes the launch line that binds ranks to its
cores."""

from ebbtide.seams import Feature

FEATURE = Feature("doctor", {"commands": {"doctor": "command"}})
