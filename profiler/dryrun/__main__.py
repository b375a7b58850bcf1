"""The process of a dry run's job."""

import os
import sys

from ebbtide.profiler.dryrun.child import main

status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
# Without the end of the interpreter: what is left of the faked device may be used while modules are torn down.
os._exit(status)
