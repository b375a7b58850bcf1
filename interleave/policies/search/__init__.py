"""The search of the adaptive policy.

It has what subgroups are assigned to, the plans that follow, and better ones.
"""
