"""Records as what a user sees: every kind of report in every format, by one document each."""
