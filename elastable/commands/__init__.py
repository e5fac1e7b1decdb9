"""One module for every part of the `elastable` command; each only parses, calls and prints."""
