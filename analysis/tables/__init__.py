"""The tables of results: each is stated once, and printed as text, HTML, JSON and in
notebooks."""
