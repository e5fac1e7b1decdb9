"""Files of checkpoints: on this machine and elsewhere, tensors in them, the manifest."""
