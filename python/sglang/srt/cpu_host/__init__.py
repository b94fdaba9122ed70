"""Lets SGLang run with the light CPU profile on a host without CUDA. Nothing here changes a CUDA host."""
