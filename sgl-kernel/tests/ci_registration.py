"""Upstream's suite registration, or nothing where only torch is installed: these tests run there too."""

try:
    from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
except ImportError:

    def register_cpu_ci(**_) -> None:
        pass

    register_cuda_ci = register_cpu_ci

__all__ = ["register_cpu_ci", "register_cuda_ci"]
