"""Gates before everything that reads parameters which late updates write."""
