"""The words for values that were not recorded or cannot be known."""

# For a name, and for a fact in a sentence.
NOT_KNOWN = "not known"
# For a figure, and for a cell of a table.
NO_VALUE = "-"
