"""The files of the user, which a dry run leaves as they are, and what the job saves and
loads."""
