"""What callers may do with jobs: submit them, check them before, read and control those that are stored."""
