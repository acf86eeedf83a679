"""Statistics of arms against a baseline, on plain arrays: estimates, verdicts, looks at growing studies, planning."""
