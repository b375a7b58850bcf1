"""The command `ebbtide`."""

import gc
import sys

# Most objects live until the end: looking for garbage as often as usual took a fifth of
# `summary` and `report`.
_OBJECTS_BETWEEN_COLLECTIONS = 200_000


def main() -> None:
    """Run a command; bad input ends with one line on stderr and exit code 2."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    from ebbtide.cli import run

    status = run(sys.argv[1:])
    # Triton, which torch imports, is made with nanobind: it reports what is not freed
    # at the end.
    if "torch" not in sys.modules:
        gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    main()
