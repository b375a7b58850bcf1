"""Bytes per parameter in mixed-precision training with Adam."""

# bf16 or fp16, on the device.
PARAM_BYTES = 2
GRAD_BYTES = 2
# Optimizer state: fp32 master weight, first moment, second moment.
STATE_BYTES = 12
# The fp32 master weight alone.
MASTER_BYTES = 4
# Optimizer state whose master is the bf16 parameter and 16 further bits: those bits,
# first moment, second moment.
REMAINDER_STATE_BYTES = 10
