import os
import shutil
import socket
from typing import Any

import pytest

from tests.conftest import torch_on_one_thread

one_thread = pytest.fixture(scope="package", autouse=True)(torch_on_one_thread)
_NAMES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="session")
def _deepspeed() -> Any:
    """It keeps groups of ranks for as long as the process lives: so it is begun once."""
    found = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its CPU Adam: needs a C++ compiler")
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        for name, value in {**_NAMES, "MASTER_PORT": str(port)}.items():
            patch.setitem(os.environ, name, value)
        found.init_distributed("gloo", verbose=False)
    return found


@pytest.fixture
def deepspeed(_deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed with one rank in this process, on its CPU accelerator."""
    for name, value in _NAMES.items():
        monkeypatch.setitem(os.environ, name, value)
    return _deepspeed
