"""Activity of a GPU over time: compute, communication, copies, idle time and its
causes."""
