"""The model on the master: its tables, its dense part, its optimizer and metrics."""
