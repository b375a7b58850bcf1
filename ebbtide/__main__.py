"""The command `ebbtide`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command; bad input ends with one line on stderr and exit code 2."""
    from ebbtide.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
