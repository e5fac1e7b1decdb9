"""Checkpoints: one version of everything, in safetensors files and a manifest, on any file system."""
