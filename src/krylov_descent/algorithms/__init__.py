"""Pure mathematics on small arrays and flat vectors."""
