"""Connections, request bodies, their models, and errors."""
