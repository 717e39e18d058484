"""Cases: which problems to ask a kernel about."""
