"""How much memory a training step takes, and the nearest job that fits. Reads no weight."""
