"""The parts of :func:`trifuse.fuse`: its steps, its swaps and its report."""
