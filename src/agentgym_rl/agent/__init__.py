"""The agent module: plays environments token-exactly. Imports nothing of the other modules but types and errors."""
