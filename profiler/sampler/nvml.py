"""Access to NVML for the whole of ebbtide. Every failure becomes a missing value or an
NvmlError."""

from typing import Any


class NvmlError(Exception):
    """NVML cannot answer, now or at all; the message says why."""


class GpuLost(NvmlError):
    """The card has fallen off the bus: nothing about it can be read any more."""


class Unsupported(NvmlError):
    """This card, driver or user will never get this value."""


class Nvml:
    """NVML, initialised. `library`: the module `pynvml`, or a replacement with the same
    functions; None imports it."""

    def __init__(self, library: Any = None) -> None:
        if library is None:
            import pynvml

            library = pynvml
        self.library = library
        self.call("nvmlInit")

    def driver(self) -> str | None:
        """Return the version of the driver; None if NVML does not give it."""
        try:
            return as_text(self.call("nvmlSystemGetDriverVersion"))
        except NvmlError:
            return None

    def close(self) -> None:
        """Shut NVML down. Safe to call twice."""
        try:
            self.call("nvmlShutdown")
        except NvmlError:
            return

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML; its errors become NvmlError."""
        try:
            return getattr(self.library, function)(*arguments)
        except self.library.NVMLError as error:
            raise self._translated(error) from None
        except AttributeError:
            raise Unsupported(
                f"this version of nvidia-ml-py has no {function}"
            ) from None

    def constant(self, name: str) -> Any:
        """Return a constant of the library. Raises Unsupported if this version does not
        have it."""
        if not hasattr(self.library, name):
            raise Unsupported(f"this version of nvidia-ml-py has no {name}")
        return getattr(self.library, name)

    def check(self, code: int) -> None:
        """Raise NvmlError if a return code inside a structure is an error."""
        if code != self.library.NVML_SUCCESS:
            raise self._translated(self.library.NVMLError(code))

    def _translated(self, error: Any) -> NvmlError:
        code = getattr(error, "value", None)
        if code == self.library.NVML_ERROR_GPU_IS_LOST:
            return GpuLost(str(error))
        permanent = (
            self.library.NVML_ERROR_NOT_SUPPORTED,
            self.library.NVML_ERROR_NO_PERMISSION,
            self.library.NVML_ERROR_FUNCTION_NOT_FOUND,
            self.library.NVML_ERROR_INVALID_ARGUMENT,
        )
        return Unsupported(str(error)) if code in permanent else NvmlError(str(error))


def as_text(value: Any) -> str | None:
    """Return a text of NVML as str; None stays None.

    Versions of nvidia-ml-py give it as bytes or as str.
    """
    return value.decode() if isinstance(value, bytes) else value
