"""Calls over the wire, and many clients at once."""
