"""What a run did: samples, report, tables, HTML page, trace file, status line."""
