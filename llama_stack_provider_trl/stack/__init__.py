"""What Llama Stack and OGX see of us, and what differs between their releases."""
