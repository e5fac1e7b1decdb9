"""Tables as library users hold them: lookups of ids and bags, updates, grouping."""
