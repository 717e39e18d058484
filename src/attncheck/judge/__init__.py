"""Judge: arrays in, Judgement out; it never sees a kernel."""
