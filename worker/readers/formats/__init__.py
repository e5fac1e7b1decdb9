"""Files of records, CSV and Parquet, and Arrow tables that Ray holds."""

__all__ = ["arrow_columns", "csv_reader", "data_files", "parquet_reader", "ray_data_reader"]
