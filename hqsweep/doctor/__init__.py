"""`hqsweep doctor`: products that this machine runs natively, exactly or not at all, and why."""
