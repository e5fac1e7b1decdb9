"""Kernels and what they run on: threads, slabs, gathering and folding rows."""

__all__ = [
    "id_index",
    "intrinsics",
    "kernel",
    "number_formats",
    "range_pool",
    "record_checks",
    "row_directory",
    "row_fold",
    "row_gather",
    "slab",
    "string_ids",
]
