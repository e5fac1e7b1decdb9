"""A model on its way: what was not trained, saving it, predicting with it."""

__all__ = ["configuration", "predictor", "saving", "trained"]
