"""The backend of torch 2.11: what differs from torch 2.13."""
