"""Bridges to other ecosystems, one file each. Each imports its package when it is first used."""
