"""A worker node: an agent that joins a service, and does what the service wants done there."""
