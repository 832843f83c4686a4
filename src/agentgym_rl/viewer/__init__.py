"""The viewer: a web page over run directories with curves, episodes, replays, comparisons and a playground."""
