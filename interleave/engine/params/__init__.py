"""The parameters of an optimizer: their gradients, their state dicts, and whatever
reads them while updates run."""
