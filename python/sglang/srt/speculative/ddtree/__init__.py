"""DDTREE: tree-structured speculative decoding from the marginals of one DFlash draft pass (arXiv 2604.12989)."""
