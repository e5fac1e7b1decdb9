"""One step: from a batch to ids, and from rows to loss and gradients."""

__all__ = ["batch_checks", "forward", "id_plan", "id_set", "train_step", "trainable"]
