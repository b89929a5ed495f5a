"""Ranks: collectives, the first meeting, heartbeats, torchrun."""
