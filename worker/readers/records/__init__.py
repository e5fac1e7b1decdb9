"""Records in memory: nests of arrays, ragged ones, tensors; what a reader is."""
