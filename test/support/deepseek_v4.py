"""A tiny DeepSeek-V4 with random weights, served with upstream's own kernels on a GPU under the graph guard's instruments."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import unittest
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.engine import Engine
from support.model_configs import MODELS, write_config
from support.processes import EngineProcess

INSTRUMENTS = "sglang.srt.model_executor.graph_guard"  # the logger that they report to
KEYS = ("auto", "bf16")  # --dsv4-index-k-dtype
VOCABULARY = MODELS["deepseek_v4"]["vocab_size"]
LENGTHS = (2500, 130, 2600, 3, 2700, 700, 3000, 255)  # of the prompts, in tokens
# Arguments of every engine.
CUDA = dict(
    load_format="dummy", device="cuda", dtype="bfloat16", attention_backend=None, mem_fraction_static=0.9,
    max_total_tokens=49152, swa_full_tokens_ratio=1.0, chunked_prefill_size=2048, context_length=8192,
    max_running_requests=8, cuda_graph_max_bs_decode=8, cuda_graph_backend_prefill="disabled",
    disable_flashinfer_autotune=True,
)  # fmt: skip
# Further arguments of engines whose answers are reproducible at any length. The selection by SGLang's default kernel
# returns tokens in an order that changes from run to run, and attention rounds in that order. Torch's order is fixed.
REPRODUCIBLE = dict(
    dsa_topk_backend="torch", max_total_tokens=131072, max_running_requests=32, cuda_graph_max_bs_decode=32
)


def write_model(folder: Path, context_length: int = 65536) -> str:
    """Write the model's configuration for a context of at least this length. Return its path."""
    scaling = MODELS["deepseek_v4"]["rope_scaling"]
    factor = max(scaling["factor"], -(-context_length // scaling["original_max_position_embeddings"]))
    positions = int(factor * scaling["original_max_position_embeddings"])
    write_config(
        "deepseek_v4", folder, max_position_embeddings=positions, rope_scaling=scaling | {"factor": factor}
    )
    return str(folder)


def replace_tilelang() -> None:
    """Where TileLang is not installed, let upstream's hyper-connections run without it.

    They have nothing to do with the indexer. Call this before SGLang's models are imported.
    """
    if importlib.util.find_spec("tilelang"):
        return
    for name in ("USE_TILELANG_MHC_PRE", "USE_TILELANG_MHC_POST", "FUSE_MHC_POST_PRE"):
        os.environ[f"SGLANG_OPT_{name}"] = "0"
    from sglang.kernels.ops.layernorm import mhc
    from sglang.srt.models import deepseek_v4, deepseek_v4_mhc

    # Select the Triton version of the Sinkhorn kernel, and nothing else.
    mhc.is_gfx1250_supported = lambda: True
    # Upstream compiles the rest in captures only, so that graphs would round in another way than eager runs.
    deepseek_v4.compile_in_capture_mode = deepseek_v4_mhc.compile_in_capture_mode = lambda function: function


def spread_weights(model: torch.nn.Module) -> None:
    """Overwrite a model's weights with random ones, the same in every process.

    Upstream's dummy weights are so small that all answers are alike.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            if not weight.dtype.is_floating_point:
                continue  # the experts of each token in the hash layers
            if weight.dim() == 1 and "norm" in name:
                new = torch.ones(weight.shape)
            else:
                spread = 0.02 if ".hc_" in name else 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5
                new = torch.randn(weight.shape, generator=generator) * spread
            weight.copy_(new.to(weight.dtype))


def use_one_stream() -> None:
    """Run what SGLang's models put on side streams on the current stream, in the order of the program."""
    enter = torch.cuda.stream

    def stream(side: torch.cuda.Stream | None) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        return (
            nullcontext() if caller.startswith(("sglang.srt.models.", "sglang.srt.layers.")) else enter(side)
        )

    torch.cuda.stream = stream


def decode_as_captured(runner: Any) -> None:
    """Let eager decoding take the path that graphs capture. Upstream's other path rounds in another way.

    On one stream, that path needs what the guard does for routed experts: they run before the shared ones and would
    overwrite their input.
    """
    from sglang.srt.model_executor.graph_guard.stream_order import keep_expert_inputs
    from sglang.srt.models import deepseek_v2, deepseek_v4

    forward, decodes = runner.forward, False

    def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal decodes
        decodes = forward_batch.forward_mode.is_decode()
        with keep_expert_inputs(runner.model) if decodes else nullcontext():
            return forward(forward_batch, *args, **kwargs)

    runner.forward = watched
    deepseek_v2.get_is_capture_mode = deepseek_v4.get_is_capture_mode = lambda: decodes


def prompts(batch: int) -> list[list[int]]:
    """Random prompts. Every second one has more compressed tokens than an indexer selects."""
    generator = torch.Generator().manual_seed(batch)
    return [
        torch.randint(2, VOCABULARY, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist()
        for i in range(batch)
    ]


def selects_all(prompt: int, tokens: int) -> bool:
    """Whether the indexers select all compressed tokens until the prompt of this number has an answer of `tokens`."""
    return LENGTHS[prompt % len(LENGTHS)] + tokens <= 4 * MODELS["deepseek_v4"]["index_topk"]


def first_differences(answers: list[list[int]], others: list[list[int]]) -> dict[int, int]:
    """By number of the prompt, the first token in which two answers differ. A shorter answer ends the comparison."""
    pairs = [enumerate(zip(*pair)) for pair in zip(answers, others, strict=True)]
    first = [next((at for at, (one, other) in pair if one != other), None) for pair in pairs]
    return {prompt: at for prompt, at in enumerate(first) if at is not None}


class Result(NamedTuple):
    """What one engine did.

    Attributes:
        outputs: by batch size, the tokens of each answer.
        reports: what the probe, the canary and the detector logged as errors.
    """

    outputs: dict[int, list[list[int]]]
    reports: list[str]


class Reports(logging.Handler):
    """Collects the errors that the guard's instruments log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        logging.getLogger(INSTRUMENTS).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


class Job:
    """What an engine's process does. A subclass says what it asks the engine in answer().

    Args:
        guard: whether the graph guard is on.
        eager: for an engine without graphs: run the same kernels that graphs capture, on one stream.
        before: called before the engine is created, to plant a fault in what it captures.
    """

    def __init__(
        self, guard: bool = True, eager: bool = False, before: Callable[[], None] | None = None
    ) -> None:
        self.guard, self.eager, self.plant = guard, eager, before

    def before(self) -> None:
        os.environ["SGLANG_GRAPH_GUARD"] = str(int(self.guard))
        replace_tilelang()
        self.reports = Reports()
        if self.eager:
            use_one_stream()
        if self.plant:
            self.plant()

    def __call__(self, engine: Engine) -> Any:
        runner = engine.scheduler.tp_worker.model_runner
        spread_weights(runner.model)
        if self.eager:
            decode_as_captured(runner)
        return self.answer(engine)

    def answer(self, engine: Engine) -> Any:
        raise NotImplementedError


class Answers(Job):
    """Greedy answers to batches of prompts. The job returns a Result.

    Args:
        tokens: by batch size, how many tokens each answer has.
        each_turn: called with the engine at each turn of its event loop.
        options: the options of Job.
    """

    def __init__(
        self, tokens: dict[int, int], each_turn: Callable[[Engine], None] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.tokens, self.each_turn = tokens, each_turn

    def answer(self, engine: Engine) -> Result:
        def turn() -> bool:
            if self.each_turn:
                self.each_turn(engine)
            return True

        outputs = {}
        for batch, tokens in self.tokens.items():
            requests = [
                engine.submit(p, temperature=0, max_new_tokens=tokens, ignore_eos=True)
                for p in prompts(batch)
            ]
            outputs[batch] = [list(r.output_ids)[:tokens] for r in engine.finish(requests, turn)]
        torch.cuda.synchronize()
        if canary := vars(engine.scheduler.tp_worker.model_runner).get("_page_canary"):
            canary.poll(wait=True)
        return Result(outputs, self.reports.found)


def start(folder: Path, job: Job, **arguments: Any) -> EngineProcess:
    """Start an engine in a process of its own and give it a job. `arguments` are fields of ServerArgs."""
    return EngineProcess(CUDA | {"model_path": write_model(folder)} | arguments, job)


def add_to_weights_in_captures() -> None:
    """Plant a fault: captured graphs add 1 to the first row of the indexers' head weights. Eager runs do not."""
    from sglang.srt.layers.linear import ReplicatedLinear

    forward = ReplicatedLinear.forward

    def faulty(self: Any, x: torch.Tensor) -> Any:
        out = forward(self, x)
        if (
            self.output_size == MODELS["deepseek_v4"]["index_n_heads"]
            and torch.cuda.is_current_stream_capturing()
        ):
            out[0][:1].add_(1)
        return out

    ReplicatedLinear.forward = faulty


class WriteToPage:
    """Plant a fault: write once to a page of the C4 index keys to which no request stores."""

    page = 150  # requests take the first pages

    def __init__(self) -> None:
        self.turns = 0

    def __call__(self, engine: Engine) -> None:
        self.turns += 1
        if self.turns == 20:
            pool = engine.scheduler.tp_worker.model_runner.token_to_kv_pool
            pool.index_pools[4].index_k_with_scale_buffer[1][self.page].add_(1)


def drop_query_before_join() -> None:
    """Plant the fault that docs/graph_safety.md tells about, for index keys in bfloat16.

    The indexer's stream projects the query, and a side stream rotates it. The last reference to the projection is
    dropped before the streams join, so the indexer's next tensor gets its memory while the side stream may still read it.
    """
    from sglang.kernels.ops.attention.dsv4 import fused_rope_inplace
    from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin

    def prepare(
        self: Any, x: torch.Tensor, q_lora: torch.Tensor, c4_indexer: Any, positions: torch.Tensor,
        forward_batch: Any, alt_streams: Any, q_lora_ready: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        current, side = torch.cuda.current_stream(), alt_streams[0]
        current.wait_event(q_lora_ready)
        projected, _ = c4_indexer.wq_b(q_lora)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.cuda._sleep(300_000)  # some other work of this stream, about 150 us
            q = projected.view(-1, c4_indexer.n_local_heads, c4_indexer.head_dim).clone()
            fused_rope_inplace(q[..., -c4_indexer.rope_head_dim :], None, c4_indexer.freqs_cis, positions)
        del projected
        self.forward_indexer_compressor(
            x=x, forward_batch=forward_batch, layer_id=c4_indexer.layer_id, compressor=c4_indexer.compressor
        )
        weights = c4_indexer.compute_weights(x, skip_scale=True).float() * c4_indexer.weight_scale
        current.wait_stream(side)
        return q, weights.unsqueeze(-1)

    C4IndexerBackendMixin._forward_prepare_multi_stream = prepare


class IndexKeysCase(unittest.TestCase):
    """Tests of engines that ran with each type of index keys.

    Attributes:
        results: by (keys, name of the engine): the result of its job, or the RuntimeError of an engine that failed.
    """

    results: dict[tuple[str, str], Any]

    def of(self, keys: str, name: str) -> Any:
        """Return the result of an engine. The test fails if the engine did."""
        result = self.results[keys, name]
        if isinstance(result, RuntimeError):
            self.fail(f"{keys}, {name}: {str(result)[-3000:]}")
        return result
