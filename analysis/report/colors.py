"""The colours of a timeline as CSS variables of the page."""

from __future__ import annotations

from ebbtide.analysis.timeline.styles import CATEGORY_STYLES, COLORS, PHASE_OPACITY

# Boxes of phases have no lines in front of them: the strongest is opaque.
STRIP_OPACITY = {phase: round(opacity / max(PHASE_OPACITY.values()), 2) for phase, opacity in PHASE_OPACITY.items()}


def color_styles() -> str:
    """Return the style sheet: a variable per colour, for light and dark pages, and fills of phases and categories."""
    light = " ".join(f"--{name}: {color.light};" for name, color in COLORS.items())
    dark = " ".join(f"--{name}: {color.dark};" for name, color in COLORS.items())
    fills = "\n".join(
        f".{name} {{ fill: var(--{name}); fill-opacity: {STRIP_OPACITY.get(name, 1)}; --key: var(--{name});"
        f" --key-opacity: {STRIP_OPACITY.get(name, 1)}; }}"
        for name in (*STRIP_OPACITY, "other")
    )
    frames = "\n".join(f".stacks .{name} rect {{ fill: var(--{s.color}); }}" for name, s in CATEGORY_STYLES.items())
    dark_style = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ {light} }}\n{dark_style}\n{fills}\n{frames}\n"
