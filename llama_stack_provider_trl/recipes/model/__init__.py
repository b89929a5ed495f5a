"""Loads, quantizes and shards a model."""
