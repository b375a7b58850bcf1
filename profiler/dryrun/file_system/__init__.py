"""The files of the user, which a dry run leaves as they are."""
