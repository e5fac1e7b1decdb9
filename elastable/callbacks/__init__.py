"""Keras callbacks in a job."""

__all__ = ["callback_list", "final_weights", "freezing"]
