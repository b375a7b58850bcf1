"""Makes the job of a dry run from the name of a model or from a recipe file of a
framework."""
