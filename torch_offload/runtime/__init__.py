"""The one engine of the process: wrapping, loading, saving, interception."""
