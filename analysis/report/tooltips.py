"""Tooltips of the boxes of a timeline: templates that Bokeh fills in with escaped values.

They are in a shadow tree, which the page's style sheet does not reach.
"""

from __future__ import annotations


def _tooltip(title: str, **rows: str) -> str:
    lines = "".join(
        f'<div style="color:var(--muted)">{label}</div><div style="text-align:right">{text}</div>'
        for label, text in rows.items()
    )
    grid = f'<div style="display:grid;grid-template-columns:auto auto;column-gap:14px">{lines}</div>'
    return f'<div style="font-weight:600">{title}</div>{grid}'


PHASE = _tooltip("$name", **{"iteration": "@iteration", "micro-step": "@micro_step", "length": "@ms{0,0.00} ms"})
SUBSTEP = _tooltip("@op", on="@on", subgroup="@subgroup", bytes="@bytes", length="@ms{0,0.00} ms")
RECURRING = _tooltip("free in every iteration", **{"phase": "@phase", "at least": "@free"})
WINDOW = _tooltip(
    "window: @phase",
    **{
        "iteration": "@iteration",
        "within it": "@span",
        "length": "@length",
        "least free": "@free",
        "h2d idle": "@h2d",
        "d2h idle": "@d2h",
    },
)
