"""Child processes, the pool of workers, and the journal of a run."""
