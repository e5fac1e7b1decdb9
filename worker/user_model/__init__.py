"""The user's model: loading, building, moving tables to a store, exporting."""

__all__ = ["build", "export", "keras_slots", "model_file", "offload"]
