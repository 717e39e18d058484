"""Room ``verify``."""
