"""Decisions about jobs. Pure functions: from records to what happens next."""
