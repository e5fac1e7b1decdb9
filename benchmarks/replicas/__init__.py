"""Replica groups: exchanges and what is trained with them."""
