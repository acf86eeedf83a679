"""`hqsweep doctor`: what this machine can run natively, exactly or not at all, and why."""
