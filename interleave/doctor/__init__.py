"""Checks of a host before a job runs, and the launch line that binds ranks to its cores."""
