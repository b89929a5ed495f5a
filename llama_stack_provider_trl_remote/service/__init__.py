"""The training service: the engine behind HTTP on port 8322. Imports neither torch nor Llama Stack."""
