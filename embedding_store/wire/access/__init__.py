"""Who may call: roles, tokens and certificates."""

__all__ = ["credentials"]
