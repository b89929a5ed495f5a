"""Estimates the memory of a training step without reading weights, and proposes the nearest job that fits."""
