"""Records a training job from inside its own processes.

`phase_hooks.py` detects PyTorch's phases (forward, backward, update), `deepspeed/phase_hooks.py` those of DeepSpeed;
`recorder.py` turns them into records, and `spool.py` writes the records to a file.

The job must not notice the agent: it uses the standard library only, and the torch of the job; it starts no thread that
`threading` lists; it prints nothing; and every entry point is guarded, so that a fault of the agent ends the recording
and never the job. `profiler/inject` loads it under its own name also where ebbtide is not installed. It therefore
imports nothing of ebbtide but its own modules, by relative imports, and stays valid Python 3.9.
"""
