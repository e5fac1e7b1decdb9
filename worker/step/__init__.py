"""A step: from a batch to ids, from rows to loss and gradients."""
