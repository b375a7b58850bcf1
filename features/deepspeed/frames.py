"""The files of DeepSpeed that allocate as optimizers do."""

import re

OPTIMIZER = re.compile(r"/deepspeed/runtime/zero/")
