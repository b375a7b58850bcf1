"""Loops that read the old optimizer state and write the new one to other memory, compiled like those in compiled.py."""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from ebbtide.interleave.engine.numerics.compiled import compile_loop, step, store


def _update(grad, old_master, old_exp_avg, old_exp_avg_sq, master, exp_avg, exp_avg_sq, out, scalars):
    for i in range(master.size):
        p, m, v = step(grad[i], old_master[i], old_exp_avg[i], old_exp_avg_sq[i], *scalars)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = p
        if out is not None:
            store(out, i, p)


def _copy(old, new):
    for i in range(new.size):
        new[i] = old[i]


update = compile_loop(_update)
copy = compile_loop(_copy)
