"""Keras callbacks in a job."""

__all__ = ["averages", "best_versions", "callback_list", "freezing"]
