"""Fuzzing: hostile bytes for every call, frame, reply, file and address that Elastable reads from outside."""
