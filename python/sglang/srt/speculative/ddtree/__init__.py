"""DDTREE: speculative decoding with trees built from one pass of a DFlash drafter (arXiv 2604.12989)."""
