"""Measures of a model: on rows, by judges, on tasks of a harness."""
