"""How to call a kernel: the contract, ours, torch's, and the ideal kernel."""
