"""Everything that a pull request needs of a kernel: what is asked, in which order, and the end."""
