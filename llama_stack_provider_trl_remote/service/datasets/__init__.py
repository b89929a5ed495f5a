"""Registered datasets: rows by digest, and the processes that read and check them."""
