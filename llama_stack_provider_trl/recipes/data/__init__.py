"""Turns rows into token ids and labels, packs them, and orders them for the ranks."""
