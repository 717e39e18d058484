"""What arithmetic a kernel has, read from what it gives on inputs made for the purpose."""
