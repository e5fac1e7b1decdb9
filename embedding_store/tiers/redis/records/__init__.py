"""Records of tables in Redis: requests and replies in bulk, the registry of tables, and the state kept with them."""
