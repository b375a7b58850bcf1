"""DeepSpeed's ZeRO stage 3 with offload, driven by a policy of ours: `enable` before `deepspeed.initialize`."""

from ebbtide.interleave.deepspeed.patching import disable, enable

__all__ = ["disable", "enable"]
