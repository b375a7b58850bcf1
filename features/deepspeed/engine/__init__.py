"""Drives ZeRO stage 3 with offload by a policy."""
