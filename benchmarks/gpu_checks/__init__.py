"""The checks of `benchmarks/gpu.py`, by subject. Each check measures in one function and judges in another."""
