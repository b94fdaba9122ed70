"""A scheduler in this process, and tiny random models for it: what the tests of DDTREE run on a CPU.

One process serves one configuration, as a server's process does: `generate` in a child of its own for each.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import torch

VOCABULARY = 16  # small, so that a random drafter's candidates are often right
MASK_TOKEN = 2


def write_models(folder: Path, *, seed: int = 0, layers: int = 3) -> tuple[str, str]:
    """Writes a random Llama target and a random DFlash drafter for it (block 8), in float32.

    Args:
        folder: to write into.
        seed: of the weights.
        layers: of the target.

    Returns:
        The paths of target and drafter.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    config = LlamaConfig(
        **shape, vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, dtype="float32",
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    for weight in target.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    target.save_pretrained(folder / "target")

    drafter = folder / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(
        json.dumps(
            dict(
                **shape,
                architectures=["DFlashDraftModel"],
                model_type="qwen3",
                vocab_size=VOCABULARY,
                num_hidden_layers=2,
                max_position_embeddings=2048,
                rms_norm_eps=1e-6,
                rope_theta=10000.0,
                hidden_act="silu",
                dtype="float32",
                attention_bias=False,
                tie_word_embeddings=False,
                block_size=8,
                num_target_layers=layers,
                dflash_config=dict(target_layer_ids=[0, 1], mask_token_id=MASK_TOKEN, block_size=8),
            )  # fmt: skip
        )
    )
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    weights = {"fc.weight": torch.randn(hidden, 2 * hidden) * 0.15}
    norms = ["hidden_norm", "norm"]
    for i in range(2):
        for name, size in {
            "self_attn.q_proj": (2 * head, hidden), "self_attn.k_proj": (head, hidden),
            "self_attn.v_proj": (head, hidden), "self_attn.o_proj": (hidden, 2 * head),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            weights[f"layers.{i}.{name}.weight"] = torch.randn(size) * 0.15
        norms += [f"layers.{i}.input_layernorm", f"layers.{i}.post_attention_layernorm"]
        for name in ("q_norm", "k_norm"):
            weights[f"layers.{i}.self_attn.{name}.weight"] = torch.ones(head)
    weights.update({f"{name}.weight": torch.ones(hidden) for name in norms})
    save_file(weights, drafter / "model.safetensors")
    return str(folder / "target"), str(drafter)


class SchedulerHost:
    """Upstream's Scheduler without its processes and sockets: requests in, finished `Req` objects out.

    Args:
        arguments: of ServerArgs; what a tiny model on a CPU needs is filled in.
    """

    def __init__(self, **arguments):
        from sglang.srt.managers import scheduler as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        arguments = dict(
            device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch",
            skip_tokenizer_init=True, mem_fraction_static=0.05, max_total_tokens=4096, max_running_requests=8,
            skip_server_warmup=True, random_seed=1,
        ) | arguments  # fmt: skip
        self.args = ServerArgs(**arguments)
        self.args.resolve_once()
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler = module.Scheduler(self.args, PortArgs.init_new(self.args))
        self.count = 0

    def submit(self, prompt: list[int], **sampling):
        """Queues a request; returns its Req. `return_logprob` and `top_logprobs_num` are not sampling parameters."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.count += 1
        logprob = {name: sampling.pop(name, default) for name, default in
                   (("return_logprob", False), ("top_logprobs_num", 0))}  # fmt: skip
        params = SamplingParams(**sampling)
        params.normalize(None)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"r{self.count}", input_text=None, input_ids=array("q", prompt), input_embeds=None, mm_inputs=None,
                token_type_ids=None, sampling_params=params, logprob_start_len=-1, token_ids_logprob=None, stream=False,
                **logprob,
            )
        )  # fmt: skip
        return self.scheduler.waiting_queue[-1]

    def step(self) -> bool:
        """One turn of the scheduler's synchronous event loop; False when there was nothing to run."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            with torch.inference_mode():
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return bool(batch)

    def generate(self, prompts: list[list[int]], **sampling) -> list:
        """Runs requests to their end; returns their Reqs."""
        requests = [self.submit(prompt, **sampling) for prompt in prompts]
        for _ in range(10000):
            if not self.step() and all(request.finished() for request in requests):
                return requests
        raise AssertionError("the requests did not finish")

    def free_slots(self) -> int:
        """Slots of the KV pool that no request holds: free ones and those that the radix cache may give up."""
        scheduler = self.scheduler
        return scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()


def in_child(arguments: dict, job, *args):
    """Starts a SchedulerHost in a forked child and returns job(host, *args); the result must pickle.

    Forked, so that the imports of SGLang (twenty seconds) are paid once by the test's process.

    Raises:
        RuntimeError: the child failed; the text is its traceback.
    """
    import multiprocessing
    import traceback

    import sglang.srt.managers.scheduler  # noqa: F401  imported before the fork
    import sglang.srt.models.registry  # noqa: F401
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401

    torch.set_num_threads(1)  # a forked child must not inherit a thread pool
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child():
        try:
            theirs.send((True, job(SchedulerHost(**arguments), *args)))
        except BaseException:
            theirs.send((False, traceback.format_exc()))
        theirs.close()

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        done, result = ours.recv()
    except EOFError:
        done, result = False, f"the child died with exit code {process.exitcode}"
    process.join()
    if not done:
        raise RuntimeError(result)
    return result
