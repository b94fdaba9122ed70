"""An engine in this process: SGLang's scheduler and model, without HTTP and without a tokenizer process."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from torch import Tensor

LoraIds = list[str | None] | None  # of each request's adapter; None: none


class Greedy(NamedTuple):
    """What Engine.greedy() found.

    Attributes:
        outputs: tokens of each answer.
        steps: verify steps of all requests together.
        accepted: accepted draft tokens of all requests together.
        free_slots: free slots of the KV pool before and after.
    """

    outputs: list[list[int]]
    steps: int
    accepted: int
    free_slots: tuple[int, int]


def _by_token(values: list[list[float]], tokens: list[list[int]]) -> Tensor:
    """Order top log-probabilities of all tokens by token. A position without any, such as a prompt's first, is 0.

    Returns:
        [positions, vocabulary] float64.
    """
    import torch

    found = torch.zeros(len(values), max(len(row or ()) for row in values), dtype=torch.float64)
    for row, of_row, order in zip(found, values, tokens):
        if of_row is not None:
            row[list(order)] = torch.tensor(list(of_row), dtype=torch.float64)
    return found


class Engine:
    """Upstream's Scheduler without its processes and sockets. Prompts go in, finished `Req` objects come out.

    A process can hold one engine only, as a server's process does: see support.processes.

    Args:
        rank: tensor-parallel rank of this process. All ranks must run the same job, with the same nccl_port.
        overlap: run upstream's overlap loop although the arguments turn it off, as DDTREE's do on a CPU. A CPU has no
            streams, so each forward ends at once. The host still processes its result one turn later.
        arguments: fields of ServerArgs. The defaults suit a tiny model on a CPU.
    """

    def __init__(self, rank: int = 0, overlap: bool = False, **arguments: Any) -> None:
        from sglang.srt.managers import scheduler as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, get_context, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        if arguments.get("tp_size", 1) > 1:  # otherwise upstream expects one NUMA node per rank
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * arguments["tp_size"]))
        arguments = dict(
            device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch",
            skip_tokenizer_init=True, mem_fraction_static=0.05, max_total_tokens=4096, max_running_requests=8,
            skip_server_warmup=True, random_seed=1,
        ) | arguments  # fmt: skip
        self.args = ServerArgs(**arguments)
        self.args.resolve_once()
        if self.args.lora_paths:
            self.args.check_server_args()  # it reads the paths
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
        if overlap:
            get_context().override("support.engine", disable_overlap_schedule=False)
        self.scheduler = module.Scheduler(self.args, PortArgs.init_new(self.args))
        self._submitted = 0
        self._aborted: set[str] = set()
        self._created: list[Req] = []
        create = self.scheduler._create_generation_req

        def remember(*args: Any, **options: Any) -> Req:
            self._created.append(create(*args, **options))
            return self._created[-1]

        self.scheduler._create_generation_req = remember

    def submit(self, prompt: list[int], **options: Any) -> Req:
        """Queue a request.

        Args:
            prompt: token ids.
            options: sampling parameters, the request's options for log-probabilities, the id of its adapter, its
                session, and its custom logit processor.

        Returns:
            The request, which finish() completes.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._submitted += 1
        defaults = dict(
            return_logprob=False, top_logprobs_num=0, logprob_start_len=-1, token_ids_logprob=None, lora_id=None,
            session_params=None, custom_logit_processor=None,
        )  # fmt: skip
        fields = {name: options.pop(name, default) for name, default in defaults.items()}
        if self.args.disaggregation_mode != "null":  # both engines get the same requests in the same order
            fields |= dict(
                bootstrap_host=self.args.host, bootstrap_port=self.args.disaggregation_bootstrap_port,
                bootstrap_room=self._submitted,
            )  # fmt: skip
        params = SamplingParams(**options)
        params.normalize(self.scheduler.tokenizer)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"r{self._submitted}", input_text=None, input_ids=array("q", prompt), input_embeds=None,
                mm_inputs=None, token_type_ids=None, sampling_params=params, stream=False, **fields,
            )
        )  # fmt: skip
        return self._created.pop()

    def generate(self, prompts: list[list[int]], lora_ids: LoraIds = None, **options: Any) -> list[Req]:
        """Run one request per prompt to its end in upstream's event loop. `options`: see submit()."""
        ids = lora_ids or [None] * len(prompts)
        return self.finish([
            self.submit(prompt, lora_id=lora_id, **options) for prompt, lora_id in zip(prompts, ids, strict=True)
        ])  # fmt: skip

    def greedy(self, prompts: list[list[int]], tokens: int, lora_ids: LoraIds = None) -> Greedy:
        """Answer each prompt with the `tokens` most likely tokens."""
        free = self.free_slots()
        requests = self.generate(prompts, lora_ids, temperature=0, max_new_tokens=tokens, ignore_eos=True)
        return Greedy(
            [list(request.output_ids)[:tokens] for request in requests],
            sum(request.spec_verify_ct for request in requests),
            sum(request.spec_num_correct_drafts for request in requests),
            (free, self.free_slots()),
        )

    def with_log_probabilities(
        self, prompts: list[list[int]], tokens: int
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Answer each prompt with the `tokens` most likely tokens.

        Returns:
            The answers, and of each [tokens, vocabulary] float64: the log-probabilities from which they were chosen.
        """
        everything = self.scheduler.model_config.vocab_size
        requests = self.generate(
            prompts, temperature=0, max_new_tokens=tokens, ignore_eos=True, return_logprob=True,
            top_logprobs_num=everything,
        )  # fmt: skip
        return (
            [list(request.output_ids)[:tokens] for request in requests],
            [
                _by_token(request.logprob.output_top_logprobs_val, request.logprob.output_top_logprobs_idx)[
                    :tokens
                ]
                for request in requests
            ],
        )

    def log_probabilities(
        self, prompts: list[list[int]], outputs: list[list[int]], lora_ids: LoraIds = None
    ) -> list[Tensor]:
        """Log-probabilities of all tokens at each token of given answers. One prefill gives those of an answer.

        Args:
            prompts: token ids.
            outputs: an answer to each prompt, from any engine.
            lora_ids: the ids of the prompts' adapters.

        Returns:
            For each output: [tokens, vocabulary] float64.
        """
        everything = self.scheduler.model_config.vocab_size
        ids = lora_ids or [None] * len(prompts)
        requests = self.finish([
            self.submit([*prompt, *output], temperature=0, max_new_tokens=1, return_logprob=True, lora_id=lora_id,
                        top_logprobs_num=everything, logprob_start_len=len(prompt) - 1)
            for prompt, output, lora_id in zip(prompts, outputs, ids, strict=True)
        ])  # fmt: skip
        return [
            _by_token(request.logprob.input_top_logprobs_val, request.logprob.input_top_logprobs_idx)[
                -len(output) :
            ]
            for request, output in zip(requests, outputs)
        ]

    def gaps(
        self, prompts: list[list[int]], outputs: list[list[int]], lora_ids: LoraIds = None
    ) -> list[list[float]]:
        """How far each output token is from this engine's first choice after the same tokens.

        Args:
            prompts: token ids.
            outputs: an answer to each prompt, from any engine.
            lora_ids: the ids of the prompts' adapters.

        Returns:
            For each token of each output, the first choice's logit minus the token's. 0 means that the token
            is the first choice. A value near 0 is a tie, which is common in bfloat16.
        """
        found = self.log_probabilities(prompts, outputs, lora_ids)
        return [
            (rows.amax(1) - rows[range(len(output)), output]).tolist() for rows, output in zip(found, outputs)
        ]

    def abort(self, request: Req) -> None:
        """Abort a request, as a server does when the client hangs up."""
        from sglang.srt.managers.io_struct import AbortReq

        self._aborted.add(request.rid)  # a request that never ran gets no finish reason
        self.scheduler.abort_request(AbortReq(rid=request.rid))

    def finish(self, requests: list[Req], each_turn: Callable[[], bool] = lambda: True) -> list[Req]:
        """Run the event loop until all requests are finished and nothing is in flight.

        Args:
            requests: from submit().
            each_turn: called at every turn of the loop. It may abort requests and may submit more and append
                them to `requests`. It returns whether it has submitted the last one.

        Returns:
            `requests`.
        """
        scheduler = self.scheduler

        def ingest_requests(stop_at_pause: bool = False) -> bool:
            complete = each_turn()
            idle = scheduler.last_batch is None  # after an idle turn the loop has checked its memory
            ended = all(request.finished() or request.rid in self._aborted for request in requests)
            scheduler.gracefully_exit = complete and idle and ended
            return True  # there may be new requests

        scheduler.ingest_requests = ingest_requests
        scheduler.gracefully_exit = False
        scheduler.run_event_loop()
        return requests

    def free_slots(self) -> int:
        """Slots of the KV pools that no request holds, those that the radix cache can evict included."""
        slots, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        if not hasattr(slots, "swa_available_size"):
            return slots.available_size() + cache.evictable_size()
        full = slots.full_available_size() + cache.full_evictable_size()
        return full + slots.swa_available_size() + cache.swa_evictable_size()

    def free_states(self) -> int:
        """States of recurrent layers that no request holds, those that the radix cache can evict included."""
        scheduler = self.scheduler
        free = scheduler.req_to_token_pool.mamba_allocator.available_size()
        return free + scheduler.tree_cache.mamba_evictable_size()
