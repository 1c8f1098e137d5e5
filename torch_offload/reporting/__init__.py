"""Reports of a run: samples, tables, HTML page, trace file, status line."""
