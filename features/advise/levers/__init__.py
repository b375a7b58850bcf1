"""Changes of settings that need less device memory, in the framework's words."""
