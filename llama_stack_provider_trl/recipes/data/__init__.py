"""Rows -> token ids and labels, their packing, and the order in which ranks take them."""
