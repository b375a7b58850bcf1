"""The terminal view of `ebbtide watch` and `ebbtide profile --watch`."""
