"""A server of tools for assistants (Model Context Protocol)."""

from ebbtide.seams import Feature

FEATURE = Feature("mcp", {"commands": {"mcp": "command"}})
