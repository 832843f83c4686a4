"""The embedded sites: a shop and its administration, a forum, a code host and a map, served on loopback."""
