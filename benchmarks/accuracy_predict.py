"""Predict the steps of a set of jobs, before their measured times are read.

    python benchmarks/accuracy_predict.py SET...

Reads `benchmarks/accuracy/SET.jobs.csv` and writes `SET.predicted.csv`, with the date
and the commit of the priors.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess

from accuracy_jobs import FOLDER, Job, predict, read_rows, write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", metavar="SET")
    for name in parser.parse_args().sets:
        jobs = read_rows(Job, FOLDER / f"{name}.jobs.csv")
        predictions = [
            prediction for job in jobs if (prediction := predict(job)) is not None
        ]
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        remarks = [
            f"predicted {today} with the priors of commit {commit.stdout.strip()}; s a "
            "step"
        ]
        write_rows(FOLDER / f"{name}.predicted.csv", remarks, predictions)
        print(f"{name}: {len(predictions)} of {len(jobs)} jobs predicted")


if __name__ == "__main__":
    main()
