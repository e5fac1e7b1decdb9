"""Comparisons of queries with candidates, and the kernels that compute them."""

from elastable.replicas.knowledge_graphs.scores.kernels.comparison import NORMS, Comparison
from elastable.replicas.knowledge_graphs.scores.kernels.distances import (
    affine,
    affine_of_two,
    boxes,
    distance,
    modulus,
    to_unit_length,
    unit_length_gradients,
)
from elastable.replicas.knowledge_graphs.scores.kernels.dot_products import (
    Dot,
    add_rows,
    blas_threads,
    one_blas_thread,
    product_gradients,
    products,
)

__all__ = [
    "NORMS",
    "Comparison",
    "Dot",
    "add_rows",
    "affine",
    "affine_of_two",
    "blas_threads",
    "boxes",
    "distance",
    "modulus",
    "one_blas_thread",
    "product_gradients",
    "products",
    "to_unit_length",
    "unit_length_gradients",
]
