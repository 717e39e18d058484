"""Our Triton kernels, and the interpreter that runs them without a GPU."""
