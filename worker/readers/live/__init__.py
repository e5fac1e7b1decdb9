"""Finite and endless streams of records."""

__all__ = ["endless_reader", "stream_reader"]
