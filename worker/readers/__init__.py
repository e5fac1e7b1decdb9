"""Readers: numbered records, fetched in any order. No TensorFlow here."""

__all__ = ["numpy_reader", "pass_reader", "stream_reader"]
