"""Tests that `ebbtide profile` never harms a job: real programs with unusual behaviour,
run bare and recorded."""
