"""Ray: starts, places, watches and ends processes. Shells without decisions."""
