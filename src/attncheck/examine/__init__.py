"""One kernel, one Case, one Record: the only place where oracle, kernel and judge meet."""
