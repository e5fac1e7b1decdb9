"""Host tables without their Keras layers."""

from typing import Any

from elastable.replicas.host_embeddings.host_embedding import create_host_embedding
from elastable.replicas.host_embeddings.host_table import HostTable
from tests.untyped import Keyword


def create_host_table(*options: Any, **named: Keyword) -> HostTable:
    """The table of `create_host_embedding`."""
    return create_host_embedding(*options, **named).table
