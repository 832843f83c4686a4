"""A web page over run directories: curves, episodes, replays, comparisons, a playground, evaluation tables."""
