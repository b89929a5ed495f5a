"""Step checkpoints and exports: what is written, verified and read back."""
