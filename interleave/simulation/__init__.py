"""The simulator of plans, and the lower bound of any plan."""
