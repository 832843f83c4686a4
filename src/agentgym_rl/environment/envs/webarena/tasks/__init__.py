"""The tasks: those generated from templates for the embedded sites, and WebArena's 812 published ones."""
