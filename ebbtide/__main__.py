"""The command `ebbtide`."""

import gc
import sys

# Most objects of a command are modules and results, which live until it ends. Looking for garbage among them as often
# as Python does by default, and once more at the end, took a fifth of the time of `summary` and of `report`.
_OBJECTS_BETWEEN_COLLECTIONS = 200_000


def main() -> None:
    """Run a command; bad input ends with one line on stderr and exit code 2."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    from ebbtide.cli import run

    status = run(sys.argv[1:])
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    main()
