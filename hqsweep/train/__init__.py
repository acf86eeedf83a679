"""What a run trains on and how: data, models and the loop, each to be read from top to bottom."""
