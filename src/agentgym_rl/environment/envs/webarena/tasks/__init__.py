"""The tasks: embedded ones, made from templates over the embedded sites, and WebArena's own 812."""
