"""Plays environments token-exactly. Imports only types and errors of the other modules."""
