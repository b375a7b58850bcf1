"""Rates of kernels on a GPU by the class of their work.

Also the efficiencies that were measured.
"""
