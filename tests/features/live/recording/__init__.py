"""Tests of following a recording."""
