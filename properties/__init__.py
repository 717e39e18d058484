"""What a right kernel has, as pytest runs it: ``pytest properties`` or, installed, ``--pyargs``."""
