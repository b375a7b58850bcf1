"""Samples what can be seen from outside the job: the card's memory and link counters, and host memory."""
