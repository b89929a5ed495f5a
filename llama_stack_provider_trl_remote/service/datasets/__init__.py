"""Registered datasets: rows by digest, and processes that read and check them."""
