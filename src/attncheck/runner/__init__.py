"""Many cases: which ones (``plan``), and one after the other (``measure``)."""
