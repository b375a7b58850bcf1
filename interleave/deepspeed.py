"""DeepSpeed's ZeRO stage 3 with offload by a policy.

Call `enable` before `deepspeed.initialize`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.features.deepspeed.engine.patching import disable, enable

__all__ = ["disable", "enable"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ebbtide.seams import public_name

    return public_name(__name__, name)
