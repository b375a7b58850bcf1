"""The process of a dry run's job."""

import faulthandler
import os
import signal
import sys

from ebbtide.profiler.dryrun.child import main

# Compiled code that reads the address of a fake tensor ends the process: the last lines of Python are printed.
faulthandler.enable(all_threads=False)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
# Without the end of the interpreter: what is left of the faked device may be used while modules are torn down.
os._exit(status)
