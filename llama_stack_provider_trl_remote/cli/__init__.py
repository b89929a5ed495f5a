"""`trl-remote`."""
