"""A model's own `train_step`: traced, planned, and run in turns."""
