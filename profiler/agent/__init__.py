"""Records a training job from inside its own processes.

`phase_hooks.py` detects phases, `recorder.py` turns them into records, and `spool.py`
writes these to a file. The job must not notice: only the standard library and the job's
torch are used; no thread is started that `threading` lists, nothing is printed, and
every entry point is guarded, so that a fault ends the recording and never the job.
`profiler/inject` loads the agent under its own name also where ebbtide is not
installed: it imports its own modules alone, by relative imports, and stays valid Python
3.9. `features/X/agent` are loaded beside it, and may import it: `from
ebbtide.profiler.agent.patches import Patches`.
"""
