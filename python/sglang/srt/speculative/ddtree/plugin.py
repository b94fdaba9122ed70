"""Entry point `sglang.srt.plugins`: registers DDTREE with upstream's registries. Imports nothing heavy."""

from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.speculative.ddtree.contract import CPU_DRAFT_BACKEND, DDTreeAlgorithm
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def register() -> None:
    """Adds the speculative algorithm DDTREE and the attention backend of its drafter on a CPU."""

    @SpeculativeAlgorithm.register("DDTREE", supports_overlap=True, spec_class=DDTreeAlgorithm)
    def worker_class(server_args):
        from sglang.srt.speculative.ddtree.worker import DDTreeWorker

        return DDTreeWorker

    @register_attention_backend(CPU_DRAFT_BACKEND)
    def draft_backend(runner):
        from sglang.srt.layers.attention.ddtree_backend import create_draft_backend

        return create_draft_backend(runner)

    add_draft_attention_backend_choices([CPU_DRAFT_BACKEND])
