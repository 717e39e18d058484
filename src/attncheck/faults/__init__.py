"""Room ``faults``."""
