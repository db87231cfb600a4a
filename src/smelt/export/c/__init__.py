"""Export of integer graphs as C99 without floating point: `source.write_source` returns the files."""
