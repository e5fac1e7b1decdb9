"""What everything below and above agrees on: arrays, specs, rows, commits, stores, pins."""
