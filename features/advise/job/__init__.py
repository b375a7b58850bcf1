"""The job to advise: its workload and settings, from a trace, a workload file or a
size, on any machine."""
