"""Environments: what they are, how they are served, and where sessions come from."""
