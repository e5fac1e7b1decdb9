"""One module per library: `prepare(race, settings)` returns what a round repeats.

A side is imported in its library's environment, which has NumPy and none of
Elastable's other dependencies.
"""
