"""The time of a dry run: a virtual clock, the work of kernels and the rates that it
takes them."""
