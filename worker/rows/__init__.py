"""Rows of a layer: their source, initial values, combination and saving."""

__all__ = [
    "array_calls",
    "export_rows",
    "id_values",
    "initializers",
    "model_inputs",
    "saved_rows",
    "scope",
    "store_backed",
    "store_layer",
]
