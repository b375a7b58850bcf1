"""Pictures of replays, schedules and plans."""
