"""What a Prometheus server scrapes: `GET /metrics`."""
