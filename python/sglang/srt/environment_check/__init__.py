"""Checks that an installation can serve: `python -m sglang.srt.environment_check [--json]`.

Without a GPU: versions, the compiler that is needed at first use, which architectures each library was built for, caches,
bills of materials, and that the modules that serve can be imported. With one, also the driver, what the card can load,
its shared memory, our kernels against their reference, and an all-reduce between cards.
"""
