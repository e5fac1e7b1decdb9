"""Knowledge graphs: `elastable kg train` and `elastable kg predict`."""
