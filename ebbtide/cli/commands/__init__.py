"""The commands: a file each, named for the command. They are imported when they run, so
that commands start fast."""
