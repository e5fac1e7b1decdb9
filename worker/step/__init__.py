"""One step: from a batch to ids, from rows to loss and gradients; which weights it trains (`trainable`)."""

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
