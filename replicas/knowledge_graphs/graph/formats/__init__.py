"""Graphs in the files of other programs: OGB, CSV, Parquet."""
