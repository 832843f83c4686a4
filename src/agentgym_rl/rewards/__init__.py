"""Rewards besides the environment's own: judges, shaping and the user's functions, over whole groups of episodes."""
