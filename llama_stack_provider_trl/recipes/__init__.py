"""The training engine: a frozen spec goes in, events and Hugging Face checkpoints come out."""
