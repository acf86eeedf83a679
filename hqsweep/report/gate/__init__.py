"""The gate for CI: a sweep against a stored baseline."""
