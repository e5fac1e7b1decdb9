"""The job of `benchmarks/click.py`, and its contenders."""
