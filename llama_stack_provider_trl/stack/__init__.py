"""The interface to Llama Stack and OGX, and the differences between their releases."""
