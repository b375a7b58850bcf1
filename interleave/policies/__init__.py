"""The policies, a file each. Importing this registers all of them."""

from ebbtide.interleave.policies import adaptive, gpu_only, interleaved, pipelined, twin_flow, zero_offload
from ebbtide.interleave.policies.registry import POLICIES, Choice, Policy, make_plan, parse, policy

# What is replayed where nothing else is asked for.
BUILT_IN = ("zero-offload", "twin-flow:0.5", "pipelined", "interleaved:2", "adaptive", "gpu-only")

__all__ = [
    "BUILT_IN",
    "POLICIES",
    "Choice",
    "Policy",
    "adaptive",
    "gpu_only",
    "interleaved",
    "make_plan",
    "parse",
    "pipelined",
    "policy",
    "twin_flow",
    "zero_offload",
]
