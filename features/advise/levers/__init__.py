"""Changes of a job's own settings that need less device memory, in the words of its
framework."""
