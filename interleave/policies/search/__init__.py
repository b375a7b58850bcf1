"""The search of the adaptive policy: what subgroups are assigned to, the plans that
follow, and better ones."""
