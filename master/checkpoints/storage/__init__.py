"""Files of checkpoints: on this machine and elsewhere, tensors in them, the manifest."""

__all__ = ["checkpoint_files", "checkpoint_locations", "manifest", "tensor_file"]
