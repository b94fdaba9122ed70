"""Upstream's suite registration, or stand-ins without effect if only torch is installed."""

try:
    from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
except ImportError:

    def register_cpu_ci(**_: object) -> None:
        pass

    register_cuda_ci = register_cpu_ci

__all__ = ["register_cpu_ci", "register_cuda_ci"]
