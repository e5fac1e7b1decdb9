"""Files of records: CSV and Parquet."""

__all__ = ["arrow_columns", "csv_reader", "data_files", "parquet_reader"]
