"""Tests of the tables of results."""
