"""Tables: files of rows, and DataFrames, from what stands in them to columns of records."""
