"""Moves weights from learners to engines."""
