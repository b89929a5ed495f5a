"""The machines of a service in its job database."""
