"""TRL's trainers with our data, losses, callbacks and references."""
