"""Rows of a layer: their source, initial values, combination and saving."""

__all__ = [
    "array_calls",
    "id_values",
    "model_inputs",
    "saved_rows",
    "scope",
    "store_backed",
    "store_layer",
]
