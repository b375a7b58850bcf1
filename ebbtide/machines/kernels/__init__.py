"""Rates of kernels on a GPU by the class of their work, and the efficiencies that were
measured."""
