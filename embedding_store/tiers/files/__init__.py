"""Tables in files, larger than memory."""
