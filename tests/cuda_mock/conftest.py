"""Fixtures over the mock of libcuda.so.1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda_mock.build import MockDriver, compile_library, skip_without_requirements
from tests.cuda_mock.launches import LaunchRecorder, MockEvent, UnpinnedHostMemory
from tests.cuda_mock.triton_cache import ENVIRONMENT


@pytest.fixture(scope="session")
def mock_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockDriver]:
    skip_without_requirements()
    library = compile_library(tmp_path_factory.mktemp("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "TRITON_LIBCUDA_PATH": str(library.parent)}.items():
            patch.setenv(name, value)
        yield MockDriver(library)


@pytest.fixture
def recorder(mock_driver: MockDriver, monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    """Record all launches of ebbtide's kernels in this test, and the variants that Triton compiles for them."""
    import triton

    from ebbtide.interleave.engine.numerics import triton_compiled, triton_kernel

    recorder = LaunchRecorder()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mock_driver, "on_launch", recorder.on_launch)
    monkeypatch.setattr(MockEvent, "recorder", recorder, raising=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", mock_driver.driver)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, fn, **_: recorder.compiled.append(fn.name.split(".")[-1])
    )
    monkeypatch.setattr(triton_kernel, "_DEVICE", "cpu")
    monkeypatch.setattr(triton_kernel, "_HOST_MEMORY", UnpinnedHostMemory())
    monkeypatch.setattr(torch.cuda, "Event", MockEvent)
    for kernel in ("update", "block_sums", "block_fingerprints", "load_table"):
        # Forget the variants of other tests. They are compiled again in no time: files of TRITON_CACHE have them.
        getattr(triton_compiled, kernel).device_caches.clear()
    return recorder
