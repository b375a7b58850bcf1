"""Checks a host before a job runs, and makes the launch line of the job.

The line binds ranks to its cores.
"""

from ebbtide.seams import Feature

FEATURE = Feature("doctor", {"commands": {"doctor": "command"}})
