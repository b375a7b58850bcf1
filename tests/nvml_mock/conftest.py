"""Fixtures over the mock of libnvidia-ml.so.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.sampler.gpu import Gpu, open_gpus
from ebbtide.profiler.sampler.nvml import Nvml
from tests.nvml_mock.build import NEWER_THAN_470, LoadedMock, compile_library, loaded
from tests.nvml_mock.cards import MockCard, write_description


class Drivers:
    """The compiled libraries: folders for LD_LIBRARY_PATH.

    Attributes:
        current: Of a driver that has all functions.
        old: Of one that lacks those of `NEWER_THAN_470`.
    """

    def __init__(self, folder: Path) -> None:
        self.current = compile_library(folder / "current")
        self.old = compile_library(folder / "old", without=NEWER_THAN_470)


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    return Drivers(tmp_path_factory.mktemp("nvml"))


OpenMock = Callable[..., tuple[list[Gpu], LoadedMock]]


@pytest.fixture
def open_mock(drivers: Drivers, tmp_path: Path) -> Iterator[OpenMock]:
    """Return a function that opens cards in this process, through the real pynvml, and
    the mock that shows them."""
    with ExitStack() as stack:

        def open_cards(
            *cards: MockCard, old_driver: bool = False, **settings: Any
        ) -> tuple[list[Gpu], LoadedMock]:
            description = write_description(tmp_path / "nvml.txt", cards, **settings)
            mock = stack.enter_context(
                loaded(drivers.old if old_driver else drivers.current, description)
            )
            nvml = Nvml()
            stack.callback(nvml.close)
            return open_gpus(nvml).gpus, mock

        yield open_cards
