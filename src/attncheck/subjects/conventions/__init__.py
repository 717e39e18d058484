"""Calling conventions: how to call a user's function, parse its calls, and render them."""
