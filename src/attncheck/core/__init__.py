"""Room ``core``."""
