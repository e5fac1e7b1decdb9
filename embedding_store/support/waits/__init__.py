"""Waits that hold no thread: results that come later, and actions at given times."""
