"""One module for every library that races: `prepare(race, settings)` makes what a turn repeats.

A side is imported in its library's own environment, where there is NumPy and
none of Elastable's other dependencies.
"""
