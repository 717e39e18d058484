"""Room ``capabilities``."""
