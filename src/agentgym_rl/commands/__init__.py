"""Commands of the CLI, one file each."""
