"""Tables whose rows are also kept in a tier: hot rows in memory, changed rows written behind."""
