"""The command line `trl-remote`."""
