"""Training without padding, with each prompt computed once. The plain path, its reference, is in `recipes.trainer`."""
