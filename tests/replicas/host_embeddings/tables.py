"""Host tables from keyword arguments, as tests of every way write them."""

from collections.abc import Sequence
from typing import Any

from elastable.replicas.host_embeddings.host_embedding import HostTableOptions
from elastable.replicas.host_embeddings.host_embedding import create_host_table as create
from elastable.replicas.host_embeddings.host_table import HostTable
from tests.untyped import Keyword

_PLACEMENT = ("group", "store", "enable_remote_buffer_embedding", "threads")


def create_host_table(name: str, shape: Sequence[int], *options: Any, **named: Keyword) -> HostTable:
    """`HostTableOptions` and the arguments of `create_host_table` in one call."""
    placement = {key: named.pop(key) for key in _PLACEMENT if key in named}
    return create(HostTableOptions(name, shape, *options, **named), **placement)
