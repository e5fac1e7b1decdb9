"""Kernels and what they run on: threads, slabs, gathering and folding rows."""
