"""Several stores as one: tables split over them, versions that all of them make, and which store each table goes to."""
