"""Small leaf modules that every package may import."""
