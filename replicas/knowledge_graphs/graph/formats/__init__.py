"""Graphs in the files of other programs: OpenKE, OGB, PyKEEN, CSV, Parquet."""
