"""A user's model computes by a recipe: its modules are converted in place, and keep their parameters."""
