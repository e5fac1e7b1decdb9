"""What of a table's rows lies where: frames in memory, records in the tier, and the state of the store there."""

__all__ = ["row_frames", "store_state", "tier_records"]
