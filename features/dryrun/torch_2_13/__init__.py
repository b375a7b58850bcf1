"""The backend of torch 2.13: all that touches private parts of torch."""
