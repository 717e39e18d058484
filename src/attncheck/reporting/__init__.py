"""Reports for users: every kind of report in every format, each through one document."""
