"""Properties of right kernels, for pytest: ``pytest properties``, or ``--pyargs`` if installed."""
