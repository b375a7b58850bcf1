import gc
import os
import socket
from typing import Any

import pytest

from tests.conftest import torch_on_one_thread

one_thread = pytest.fixture(scope="package", autouse=True)(torch_on_one_thread)
_NAMES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="session")
def _deepspeed(deepspeed_extensions: None) -> Any:
    """Initialize DeepSpeed once, with the process groups that it keeps until the process ends."""
    import deepspeed as module

    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        for name, value in {**_NAMES, "MASTER_PORT": str(port)}.items():
            patch.setitem(os.environ, name, value)
        module.init_distributed("gloo", verbose=False)
    # DeepSpeed runs the garbage collector for every engine, which takes half a second if its own modules are included.
    gc.collect()
    gc.freeze()
    return module


@pytest.fixture
def deepspeed(_deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return DeepSpeed with one rank in this process, on its CPU accelerator."""
    for name, value in _NAMES.items():
        monkeypatch.setitem(os.environ, name, value)
    return _deepspeed
