"""A model on its way: where its tables go, what was not trained, saving it."""

__all__ = ["saving", "table_places", "tables_in_store", "trained"]
