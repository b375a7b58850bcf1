"""Advice and limits that several rules share."""

from __future__ import annotations

# A cause that costs less than this share of an iteration is not reported.
MIN_SHARE = 0.01
RECORD_COPIES = "record each copy: ebbtide profile --transfers"
ENABLE_ENGINE = '`ebbtide.interleave.deepspeed.enable(policy="adaptive")`'
