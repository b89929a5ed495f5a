"""The dashboard: pages on the service's own port, which show what the API answers."""
