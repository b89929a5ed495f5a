"""Plots of jobs as files: points from a service or a data directory, their curves, and the files."""
