"""One step: from a batch to ids, and from rows to loss and gradients."""

__all__ = [
    "array_step",
    "forward",
    "id_plan",
    "id_set",
    "step_plan",
    "steps",
    "train_step",
    "trainable",
]
