"""The commands of ``cglab``: each takes parsed options and returns what to say and whether it held."""
