"""Starts, observes and ends one task: one training process tree on one node."""
