"""The calibrate job: measured errors against theory."""
