"""Features: packages that plug into the seams of the core. See `ebbtide.seams`."""
