"""Row optimizers: from a summed gradient to new weights and slots."""
