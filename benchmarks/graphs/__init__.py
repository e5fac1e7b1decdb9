"""Knowledge graphs: speed, bounds, quality."""
