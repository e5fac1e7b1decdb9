"""A row's values: made, checked, kept in their dtype, put into blocks."""
