"""Exported names are a promise: this list changes together with the changelog."""

import re
import subprocess
import sys

import pytest

import elastable
from elastable import embedding_store

pytestmark = pytest.mark.process

#: The map of names in the package's docstring, which is what `help(elastable)` shows.
ELASTABLE = sorted(re.findall(r"`(\w+)`", (elastable.__doc__ or "").partition("\n* ")[2].rpartition("\n\n")[0]))
EMBEDDING_STORE = """
    AdmissionSpec Bags Coalescer Commit Credentials EmbeddingStore EmbeddingTable EvictionSpec
    Grouping INITIALIZER_KINDS IndexedSlices Indexer InitializerSpec LookupStrategy MemoryStore OptimizerSpec
    PartitionedStore RemoteSource RemoteStore RowBlock RowOptimizer RowSource SCALED_INITIALIZERS ShardOrigin
    SharedMemoryStore SharedSource SlotSpec TableSlices TableSpec TableStatistics TableUpdate WEIGHT_DTYPES
    as_ids coalesce coalesce_many convert_table initial_rows lookup_many register_row_optimizer
    repartition require_gradients require_ids size unique_ids update_many update_tables
"""


def test_elastable() -> None:
    assert sorted(elastable.__all__) == ELASTABLE
    for name in ELASTABLE:
        assert getattr(elastable, name) is not None
        assert name in dir(elastable)


def test_embedding_store() -> None:
    assert sorted(embedding_store.__all__) == EMBEDDING_STORE.split()
    for name in EMBEDDING_STORE.split():
        assert getattr(embedding_store, name) is not None


def test_an_unknown_name_is_reported_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'elastable' has no attribute 'Embeding'; it has .*Embedding"):
        _ = elastable.Embeding


def test_importing_elastable_does_not_load_tensorflow() -> None:
    program = "import sys, elastable; print({'tensorflow', 'keras', 'numba', 'grpc'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "set()\n", ran.stderr


def test_importing_the_embedding_store_is_cheap_and_never_loads_tensorflow() -> None:
    program = (
        "import sys; from elastable import embedding_store; late = {'numba', 'redis', 'grpc'} & set(sys.modules);"
        "[getattr(embedding_store, name) for name in embedding_store.__all__];"
        "print(late, {'tensorflow', 'keras'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "set() set()\n", ran.stderr
