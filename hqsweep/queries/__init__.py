"""Questions about runs in SQL: the tables that a query sees, and the query."""
