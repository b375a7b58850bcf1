"""Drives DeepSpeed's ZeRO stage 3 with offload by a policy: call `enable` before `deepspeed.initialize`."""

from ebbtide.interleave.deepspeed.patching import disable, enable

__all__ = ["disable", "enable"]
