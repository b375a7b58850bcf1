"""Tests of `ebbtide.features.live.agent`."""
