"""Lines to paste with values in place of their marks, as a user fills them in."""

from __future__ import annotations

import re

VALUES = {
    "lr": "0.0001",
    "max_grad_norm": "1.0",
    "gradient_clipping": "1.0",
    "train_micro_batch_size_per_gpu": "1",
}


def filled(lines: str) -> str:
    """Return code, or a configuration as JSON, with values for all that is to be filled
    in."""
    lines = re.sub(
        r"(\w+)=\.\.\.,  # fill in: .*",
        lambda match: f"{match[1]}={VALUES[match[1]]},",
        lines,
    )
    return re.sub(
        r'"(\w+)": "fill in: [^"]*"',
        lambda match: f'"{match[1]}": {VALUES[match[1]]}',
        lines,
    )
