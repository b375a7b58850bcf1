"""Tests of the figures of a recording that runs."""
