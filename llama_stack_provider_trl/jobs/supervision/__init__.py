"""Advances jobs: attempts, their ends, retries, searches."""
