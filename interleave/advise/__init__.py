"""One answer to what a job should do on a machine: its replay under any policy, the recommendation, the plan that makes
it fit, and the lines to paste."""
