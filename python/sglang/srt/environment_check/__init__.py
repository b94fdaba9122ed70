"""Checks that an installation can serve: ``python -m sglang.srt.environment_check [--json]``.

Without a GPU it checks versions, environment variables, caches, bills of materials, the compiler that JIT
kernels need, the architectures of each library, and that every module that serves can be imported. With a GPU
it also checks the driver, what the card can load, its shared memory, our kernels against their reference, and
an all-reduce between cards.
"""
