"""No request is the first to use a kernel of DDTREE: a kernel that compiles while serving makes every request wait.

Upstream compiles its kernels of a prefill when a server answers the request that it sends itself before it is ready.
What is still compiled later, for another batch or alignment, is compiled later by a plain server too.
"""

import unittest

from sglang.test.ci.ci_register import register_cuda_ci
from support.cuda import CUDA
from support.models import write_models_for
from support.processes import EngineProcess
from support.prompts import patterned_prompts

register_cuda_ci(est_time=120, suite="gpu")

PROMPTS = patterned_prompts(
    (1, 5, 16, 17, 63, 64, 300)
)  # Triton compiles apart for 1 and for multiples of 16
WARM_UP_PROMPT = [10, 11, 12]  # of the request that a server of SGLang 0.5.23 sends itself
SECONDS = 240


def late_kernels(engine) -> list[str]:
    """Name of the Triton kernels that requests load after a server's own: greedy and sampled, alone and together."""
    import triton

    engine.generate([WARM_UP_PROMPT], temperature=0, max_new_tokens=8)
    loaded = []
    # What upstream's triton_load_watch hooks, but that only logs.
    triton.knobs.runtime.kernel_load_start_hook.add(
        lambda module, function, name, metadata_group, hash: loaded.append(name)
    )
    for options in (dict(temperature=0), dict(temperature=1.0, top_p=0.9, min_p=0.05)):
        for count in (1, 3, len(PROMPTS)):
            engine.generate(PROMPTS[:count], max_new_tokens=12, ignore_eos=True, **options)
    return sorted(set(loaded))


class TestWarmUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        _, target, drafter = write_models_for(cls)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(
            speculative_algorithm="DDTREE", speculative_draft_model_path=drafter, speculative_num_draft_tokens=32,
        )  # fmt: skip
        children = {
            (algorithm, backend): EngineProcess(arguments | dict(attention_backend=backend), late_kernels)
            for backend in (None, "triton")
            for algorithm, arguments in (("none", plain), ("DDTREE", tree))
        }
        cls.loaded = {case: child.result(SECONDS) for case, child in children.items()}

    def test_no_request_loads_a_kernel_of_ddtree(self):
        for backend in (None, "triton"):
            with self.subTest(prefill=backend or "upstream's choice"):
                plain, tree = self.loaded["none", backend], self.loaded["DDTREE", backend]
                print(f"{backend}: loaded late by a plain server: {plain}, by DDTREE: {tree}")
                self.assertEqual(set(tree) - set(plain), set())


if __name__ == "__main__":
    unittest.main(verbosity=2)
