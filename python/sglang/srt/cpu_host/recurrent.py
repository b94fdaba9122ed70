"""The recurrent layers of hybrid models on a CPU host. Upstream has them only for GPUs and for CPUs with AMX."""

from sgl_kernel.mamba import causal_conv1d_fn_cpu as causal_conv1d_fn
from sgl_kernel.mamba import causal_conv1d_update_cpu as causal_conv1d_update
from sgl_kernel.mamba import mamba_chunk_scan_cpu as mamba_chunk_scan_combined
from sgl_kernel.mamba import selective_state_update_cpu as selective_state_update

# Models ask for Triton's convolution if they need one that reads any strides. The CPU's does.
causal_conv1d_fn_triton = causal_conv1d_fn
causal_conv1d_update_triton = causal_conv1d_update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_fn_triton",
    "causal_conv1d_update",
    "causal_conv1d_update_triton",
    "mamba_chunk_scan_combined",
    "selective_state_update",
]
