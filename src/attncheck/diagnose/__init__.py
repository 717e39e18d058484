"""Room ``diagnose``."""
