"""The user's model: loading, building, moving tables to a store, exporting."""
