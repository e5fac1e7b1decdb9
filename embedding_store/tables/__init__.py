"""Tables as library users hold them, and their rows: lookups, updates, grouping, checks, dtypes, initial values."""

__all__ = [
    "checks",
    "grouping",
    "initial_values",
    "lookups",
    "many_tables",
    "row_blocks",
    "row_dtypes",
    "table",
    "table_reader",
    "table_update",
]
