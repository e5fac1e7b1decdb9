"""Several stores as one: tables split over them, versions that all of them make, and which store each table goes to."""

__all__ = ["composite_store", "locations", "moving", "partitioned_store", "partitions", "store_servers"]
