"""The tables of results.

Each is stated once, and printed as text, HTML, JSON and in notebooks.
"""
