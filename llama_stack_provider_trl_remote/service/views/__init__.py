"""What the service shows of jobs: checkpoints, events, preflights."""
