"""The phases of a training iteration.

The agent, which imports nothing of ebbtide, has the same names in
`profiler/agent/spool.py`.
"""

FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
# The phases that are recorded, in the order of an iteration.
PHASES = (FORWARD, BACKWARD, UPDATE)
# The part of an iteration that no phase covers.
OTHER = "other"
ITERATION_PARTS = (*PHASES, OTHER)
