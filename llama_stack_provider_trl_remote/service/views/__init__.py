"""Views of jobs: checkpoints, events, preflights."""
