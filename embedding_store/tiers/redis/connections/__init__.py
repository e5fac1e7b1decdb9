"""How commands reach the servers of a Redis: sockets, pools, topology, redirections, and replies that are accepted."""

__all__ = ["redis_connection", "reply_shapes", "topology"]
