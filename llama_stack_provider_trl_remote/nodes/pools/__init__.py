"""Where nodes come from: machines that are reached over SSH."""
