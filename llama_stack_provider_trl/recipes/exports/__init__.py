"""Exports of models to files that other programs read, each compared with the model before it counts as done."""
