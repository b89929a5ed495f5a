"""What monitoring reads of the job database, and what trackers have of it."""
