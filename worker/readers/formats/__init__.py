"""Files of records: CSV and Parquet."""
