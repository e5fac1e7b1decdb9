"""Write-ahead logs: every change of a store as one entry, appended before anybody sees the change."""

__all__ = ["acknowledged", "changes", "contract", "file_log", "framing", "inspection", "segment"]
