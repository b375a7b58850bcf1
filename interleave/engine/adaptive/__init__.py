"""Makes plans for a running job, and corrects them by measured rates."""
