"""Arrays in, judgement out: the judge never sees a kernel."""
