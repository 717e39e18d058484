"""The kernel interface (Subject), capability tables, and the configuration that names kernels."""
