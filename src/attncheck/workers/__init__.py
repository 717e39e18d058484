"""Room ``workers``."""
