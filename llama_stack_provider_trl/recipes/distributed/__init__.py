"""Ranks: collectives, rendezvous, heartbeats, torchrun."""
