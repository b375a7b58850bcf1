"""The search of the adaptive policy: the assignments of subgroups, the plans that
follow, and better ones."""
