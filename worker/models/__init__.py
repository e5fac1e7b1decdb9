"""A person's model: loaded, built, moved to the store, exported."""
