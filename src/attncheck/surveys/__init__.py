"""Room ``surveys``."""
