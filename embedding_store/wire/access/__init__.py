"""Who may call: roles, tokens and certificates."""
