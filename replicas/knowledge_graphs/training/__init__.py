"""A training run of a model of a graph: its checkpoints, and what is asked of them."""
