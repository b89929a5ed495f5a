"""How one task (one training process tree on one node) is started, watched and ended."""
