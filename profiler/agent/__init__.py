"""The part that runs inside the training job.

It must not be felt there: standard library only beside the job's own torch, no thread that `threading` lists,
nothing printed, and every entry point guarded so that a fault here ends the recording and never the job. It
is loaded under its own name even where the package around it is not installed (`profiler/inject`), so it
imports nothing of ebbtide but its own modules, by relative imports, and stays readable by Python 3.9.
"""
