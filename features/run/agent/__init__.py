"""Loads the driver of `ebbtide run` into the processes of a job."""
