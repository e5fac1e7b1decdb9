"""Training runs: defaults, epochs, checkpoints, and predictions from them."""
