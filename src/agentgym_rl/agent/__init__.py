"""Plays environments token-exactly. Knows no environment and no trainer."""
