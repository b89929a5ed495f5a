"""Pools of machines: who owns them, and how they are requested; machines that are reached over SSH."""
