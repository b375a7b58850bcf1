"""The folder of compiled Triton kernels, of the test environment's own: a session
compiles only what has changed."""

from __future__ import annotations

import sys
from pathlib import Path

TRITON_CACHE = Path(sys.prefix) / "triton_cache"
ENVIRONMENT = {"TRITON_CACHE_DIR": str(TRITON_CACHE)}
