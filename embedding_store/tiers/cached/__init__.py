"""Hot rows of any other store, kept in memory."""
