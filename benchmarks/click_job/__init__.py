"""The job of `benchmarks/jobs/click.py`, and its contenders."""
