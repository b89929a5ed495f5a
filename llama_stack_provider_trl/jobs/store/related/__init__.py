"""What reaches several jobs: those that come after others, the trials of a search, and cancels."""
