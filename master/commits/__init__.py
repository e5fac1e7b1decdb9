"""From pushes to a version: which count, their sum, clipping, the commit."""

__all__ = ["accumulate", "committer", "dense_part", "push_protocol", "row_gradients", "version_record"]
