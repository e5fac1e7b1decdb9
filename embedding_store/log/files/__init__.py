"""A log in files: segments of a folder, and the base before them."""
