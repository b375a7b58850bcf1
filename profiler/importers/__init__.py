"""The path of `load.import_trace`, whose code is the feature `importers`."""
