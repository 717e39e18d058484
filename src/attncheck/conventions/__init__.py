"""Room ``conventions``."""
