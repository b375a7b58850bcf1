"""Makes plans for a running job, and corrects them with measured rates."""
