"""A trained model, loaded once: ranks, scores, answers, neighbours, and its embeddings in other formats."""
