"""`et.EdlEmbedding`: `et.Embedding` with the argument names of ElasticDL."""

from __future__ import annotations

from typing import Any

import keras

from elastable.worker.layers.embedding import Embedding

__all__ = ["EdlEmbedding"]


@keras.saving.register_keras_serializable(package="elastable")
class EdlEmbedding(Embedding):
    """`(batch, n)` integer ids to `(batch, n, embedding_dim)` rows.

    Args:
        embedding_size: Size of the vocabulary; None: any int64 id.
        embedding_dim: Columns of a row.
        name: Of the layer and of its table.
        embedding_initializer: Distribution of the rows, by Keras' names.
    """

    def __init__(
        self,
        embedding_size: int | None,
        embedding_dim: int,
        name: str | None = None,
        embedding_initializer: keras.Initializer | str = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            embedding_size, embedding_dim, embeddings_initializer=embedding_initializer, name=name, **kwargs
        )

    def get_config(self) -> dict[str, object]:
        """Everything needed to make the layer again, by this class's names."""
        config = super().get_config()
        config["embedding_size"] = config.pop("input_dim")
        config["embedding_dim"] = config.pop("output_dim")
        config["embedding_initializer"] = config.pop("embeddings_initializer")
        return config
