"""What lets SGLang run on a host without CUDA with the light CPU profile. Nothing here acts on a CUDA host."""
