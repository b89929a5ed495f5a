"""The models that a training method reads beside its own."""
