"""Store servers on the wire: their calls, whoever makes them, and whoever answers."""
