"""Makes torch's C++ side of a CPU build believe that it has CUDA devices, by objects in
place of two of its own.

Autograd asks two objects about CUDA: the device guard in
`c10::impl::device_guard_impl_registry`, and the hooks that `at::detail::getCUDAHooks()`
returns. A CPU build has no guard, and hooks that raise.
"""

import ctypes
import re
from pathlib import Path
from typing import Any

from ebbtide.features.dryrun.errors import DryRunError

# The entries of the hooks' table of virtual functions that are used, by their place in
# it.
_SLOTS = {
    2: "isBuilt",
    3: "isAvailable",
    4: "hasPrimaryContext",
    5: "init",
    6: "deviceCount",
    7: "setCurrentDevice",
    8: "getCurrentDevice",
    9: "exchangeDevice",
    10: "maybeExchangeDevice",
}
_HOOK_SLOTS = 48
_GUARD_SLOTS = 40
_CUDA = 1
# The entry of the guard's table that returns the current device: its type, and its
# index in the next byte.
_GUARD_DEVICE = 2
_VIRTUAL = re.compile(r"\bvirtual\b[^;{(]*[\s&*](~?\w+)\(")
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
# Objects that C++ may call until the process ends.
_KEEP_ALIVE: list[Any] = []


class CudaStubs:
    """The two stubs, installed until `remove`."""

    def __init__(self, torch: Any, devices: int) -> None:
        def current() -> int:
            return int(torch.cuda.current_device())

        _check_layout(torch)
        library = Path(torch.__file__).parent / "lib"
        core, cpu = (
            ctypes.CDLL(str(library / "libc10.so")),
            ctypes.CDLL(str(library / "libtorch_cpu.so")),
        )
        self._registry = (ctypes.c_void_p * 24).in_dll(
            core, "_ZN3c104impl26device_guard_impl_registryE"
        )
        self._guard_before = self._registry[_CUDA]
        # An object: the address of its table, and zeros as its data.
        guard = (ctypes.c_void_p * 8)(
            _table(dict.fromkeys(range(_GUARD_SLOTS), 0), _GUARD_SLOTS)
        )
        _KEEP_ALIVE.append(guard)
        self._registry[_CUDA] = ctypes.addressof(guard)
        # Torch replaces a guard that counts no devices by its own guard that does
        # nothing, but for the current device.
        torch._C._ensureCUDADeviceGuardSet()
        of_torch = ctypes.c_void_p.from_address(self._registry[_CUDA] or 0).value
        guard[0] = _table(
            {_GUARD_DEVICE: lambda: _CUDA | current() << 8}, _GUARD_SLOTS, of_torch
        )
        self._registry[_CUDA] = ctypes.addressof(guard)
        get_hooks = cpu._ZN2at6detail12getCUDAHooksEv
        get_hooks.restype = ctypes.c_void_p
        self._hooks = ctypes.c_void_p.from_address(get_hooks())
        self._table_before = self._hooks.value
        assert self._table_before is not None
        values = {**dict.fromkeys(_SLOTS, 0), 2: 1, 3: 1, 6: devices, 8: current}
        self._hooks.value = _table(values, _HOOK_SLOTS, self._table_before)

    def remove(self) -> None:
        """Put torch's own objects back."""
        self._hooks.value = self._table_before
        self._registry[_CUDA] = self._guard_before


def _check_layout(torch: Any) -> None:
    headers = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    try:
        text = (headers / "AcceleratorHooksInterface.h").read_text(encoding="utf-8")
    except OSError:
        text = ""
    # A destructor has two entries.
    layout = {slot + 1: name for slot, name in enumerate(_VIRTUAL.findall(text))}
    if any(layout.get(slot) != name for slot, name in _SLOTS.items()):
        raise DryRunError(
            "a dry run needs torch 2.13 or 2.11, whose layout it knows; "
            f"this is {torch.__version__} with another one"
        )


def _table(values: dict[int, Any], slots: int, copied: int | None = None) -> int:
    """Return the address of a table of virtual functions that return `values`, or what
    these return; the others are copied."""
    table = (ctypes.c_void_p * slots)(
        *((ctypes.c_void_p * slots).from_address(copied) if copied else ())
    )
    for slot, value in values.items():
        function = _FUNCTION(
            lambda _object, _argument, value=value: (
                value() if callable(value) else value
            )
        )
        _KEEP_ALIVE.append(function)
        table[slot] = ctypes.cast(function, ctypes.c_void_p)
    _KEEP_ALIVE.append(table)
    return ctypes.addressof(table)
