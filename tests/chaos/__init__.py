"""Chaos: seeded schedules of faults on real processes, each compared to the bit with a job that met none."""
