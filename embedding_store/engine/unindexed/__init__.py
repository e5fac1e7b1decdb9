"""Tables whose ids are found in their tier: only rows in memory have an entry in memory."""
