"""Room ``inputs``."""
