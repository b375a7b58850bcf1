"""Tests of the choice of a machine for a job."""
