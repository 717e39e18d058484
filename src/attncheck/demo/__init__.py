"""Deliberately faulty kernels for `attncheck demo`; no module of attncheck imports them."""
