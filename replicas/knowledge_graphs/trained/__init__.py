"""A trained model, loaded once: ranks, scores, answers, and its embeddings in files."""
