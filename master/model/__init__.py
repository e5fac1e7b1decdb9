"""The model on the master: its tables, its dense part, its optimizer and metrics."""

__all__ = ["dense", "discovery", "keras_optimizer", "model_metrics", "wrapping_optimizers"]
