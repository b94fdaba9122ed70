"""The container image: what its stages call (wheels, cuda, prune, info), and its build and test (build, test)."""
