"""A trained model, loaded once: ranks, scores, answers, and its embeddings in files."""

__all__ = ["rank_report", "trained_graph"]
