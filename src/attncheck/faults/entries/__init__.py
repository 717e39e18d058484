"""Room ``entries``."""
