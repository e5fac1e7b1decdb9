"""The job of `benchmarks/click.py`, and those who do it."""
