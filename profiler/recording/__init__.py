"""Records a job: starts and ends the recording, follows it, and turns what agent and
sampler wrote into a trace."""
