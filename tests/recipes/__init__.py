"""Programs of training frameworks in dry runs, as their documentation starts them, in
environments of their own."""
