"""One step: from a batch to ids, and from rows to loss and gradients."""
