"""Checkpoints: one version of everything, in safetensors files and a manifest, on any file system."""

__all__ = ["checkpoint", "comparing", "restoring", "row_saver", "series", "writing"]
