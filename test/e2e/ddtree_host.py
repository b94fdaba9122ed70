"""A scheduler in this process, and tiny random models for it: what the tests of DDTREE run on a CPU.

One process serves one configuration, as a server's process does: `generate` in a child of its own for each.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from array import array
from pathlib import Path

import torch

VOCABULARY = 16  # small, so that a random drafter's candidates are often right
MASK_TOKEN = 2
SYMBOLS = ("<s>", "</s>", "<mask>", *'{}":,[]01ab-c')  # the tokens, by id: enough for a small JSON


def write_models(
    folder: Path, *, seed: int = 0, layers: int = 3, vocabulary: int = VOCABULARY
) -> tuple[str, str]:
    """Writes a random Llama target and a random DFlash drafter for it (block 8), in float32.

    Args:
        folder: to write into.
        seed: of the weights.
        layers: of the target.
        vocabulary: tokens; the tokenizer knows the first VOCABULARY of them.

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
        **shape, vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, dtype="float32",
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    for weight in target.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    target.save_pretrained(folder / "target")
    _tokenizer().save_pretrained(folder / "target")

    drafter = folder / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(
        json.dumps(
            dict(
                **shape,
                architectures=["DFlashDraftModel"],
                model_type="qwen3",
                vocab_size=vocabulary,
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


def write_mla_target(folder: Path, *, seed: int = 3, nope: int = 64, value: int = 64) -> str:
    """Writes a random DeepSeek-V2 of dense layers, whose attention is MLA of the real latent size (512 + 64).

    The drafter of write_models() fits it.

    Args:
        folder: to write into.
        seed: of the weights.
        nope, value: head sizes of K without its rotary part, and of V; the real ones are 128.
    """
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    hidden, heads, rope, latent, layers = 128, 2, 64, 512, 3
    config = dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_size=hidden, intermediate_size=256,
        moe_intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        vocab_size=VOCABULARY, max_position_embeddings=2048, kv_lora_rank=latent, q_lora_rank=None,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value, first_k_dense_replace=layers,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, topk_group=1, n_group=1, topk_method="greedy",
        rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1, dtype="bfloat16", attention_bias=False, moe_layer_freq=1, scoring_func="softmax",
        rope_scaling=dict(type="yarn", rope_type="yarn", factor=2.0, original_max_position_embeddings=1024, beta_fast=32,
                          beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    )  # fmt: skip
    weights = {"model.norm.weight": torch.ones(hidden)}
    sizes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        sizes |= {
            f"{layer}.self_attn.q_proj": (heads * (nope + rope), hidden),
            f"{layer}.self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            f"{layer}.self_attn.kv_b_proj": (heads * (nope + value), latent),
            f"{layer}.self_attn.o_proj": (hidden, heads * value),
            f"{layer}.mlp.gate_proj": (256, hidden), f"{layer}.mlp.up_proj": (256, hidden),
            f"{layer}.mlp.down_proj": (hidden, 256),
        }  # fmt: skip
        weights[f"{layer}.self_attn.kv_a_layernorm.weight"] = torch.ones(latent)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
    for name, size in sizes.items():
        weights[f"{name}.weight"] = torch.randn(size) * (0.9 if "embed" in name else 0.1)
    target = folder / "mla"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, target / "model.safetensors")
    return str(target)


def write_fp8_target(target: str, folder: Path, **scales: float) -> str:
    """Writes write_models()' target as an FP8 checkpoint, whose attention has scales; its linear layers are left as they are.

    Args:
        target: folder of that target.
        folder: to make.
        scales: k_scale and v_scale of every layer; none: the checkpoint has none.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    linear = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
              "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    config["quantization_config"] = dict(
        quant_method="fp8", activation_scheme="dynamic",
        ignored_layers=["lm_head", *(f"{layer}.{name}" for layer in layers for name in linear)],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name, scale in scales.items():
        for layer in layers:
            weights[f"{layer}.self_attn.{name[0]}_proj.{name}"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def write_gpt_oss_target(folder: Path, *, seed: int = 4) -> str:
    """Writes a random gpt-oss without its experts' weights: attention sinks, and a window of 32 in layers 0 and 2.

    The drafter of write_models() fits it.
    """
    from safetensors.torch import save_file
    from transformers import GptOssConfig

    torch.manual_seed(seed)
    hidden, heads, head, layers = 128, 2, 64, 3
    config = GptOssConfig(
        hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=1, head_dim=head, vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=2048, sliding_window=32, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    target = folder / "gpt-oss"
    config.save_pretrained(target)
    weights = {"model.norm.weight": torch.ones(hidden)}
    sizes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, rows in dict(q_proj=heads * head, k_proj=head, v_proj=head).items():
            sizes[f"{layer}.self_attn.{name}.weight"] = rows, hidden
            sizes[f"{layer}.self_attn.{name}.bias"] = (rows,)
        sizes[f"{layer}.self_attn.o_proj.weight"] = hidden, heads * head
        sizes[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
        weights[f"{layer}.self_attn.sinks"] = torch.randn(heads) + 1
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
    for name, size in sizes.items():
        weights[name] = torch.randn(size) * (0.9 if "embed" in name else 0.15)
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, target / "model.safetensors")
    return str(target)


def _tokenizer():
    """One token a symbol."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert len(SYMBOLS) == VOCABULARY
    tokenizer = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<mask>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )


class SchedulerHost:
    """Upstream's Scheduler without its processes and sockets: requests in, finished `Req` objects out.

    Args:
        rank: of this process; at tensor parallelism all ranks must do the same, with one nccl_port.
        arguments: of ServerArgs; what a tiny model on a CPU needs is filled in.
    """

    def __init__(self, rank: int = 0, **arguments):
        from sglang.srt.managers import scheduler as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        if arguments.get("tp_size", 1) > 1:  # else upstream wants a NUMA node a rank
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * arguments["tp_size"]))
        arguments = dict(
            device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch",
            skip_tokenizer_init=True, mem_fraction_static=0.05, max_total_tokens=4096, max_running_requests=8,
            skip_server_warmup=True, random_seed=1,
        ) | arguments  # fmt: skip
        self.args = ServerArgs(**arguments)
        self.args.resolve_once()
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
        self.scheduler = module.Scheduler(self.args, PortArgs.init_new(self.args))
        self.count = 0
        self.aborted = set()
        self._created = []
        create = self.scheduler._create_generation_req

        def remember(*args, **options):
            self._created.append(create(*args, **options))
            return self._created[-1]

        self.scheduler._create_generation_req = remember

    def submit(self, prompt: list[int], **sampling):
        """Queues a request; returns its Req. Of its options those of logprobs are not sampling parameters."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.count += 1
        logprob = {name: sampling.pop(name, default) for name, default in
                   (("return_logprob", False), ("top_logprobs_num", 0), ("logprob_start_len", -1),
                    ("token_ids_logprob", None))}  # fmt: skip
        params = SamplingParams(**sampling)
        params.normalize(self.scheduler.tokenizer)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"r{self.count}", input_text=None, input_ids=array("q", prompt), input_embeds=None, mm_inputs=None,
                token_type_ids=None, sampling_params=params, stream=False,
                **logprob,
            )
        )  # fmt: skip
        return self._created.pop()

    def generate(self, prompts: list[list[int]], **sampling) -> list:
        """Runs requests to their end in upstream's own event loop; returns their Reqs."""
        return self.finish([self.submit(prompt, **sampling) for prompt in prompts])

    def greedy(
        self, prompts: list[list[int]], tokens: int
    ) -> tuple[list[list[int]], int, int, tuple[int, int]]:
        """Greedy answers of `tokens` tokens: those of each; verify steps and accepted drafts of all; slots free before and
        after.
        """
        free = self.free_slots()
        requests = self.generate(prompts, temperature=0, max_new_tokens=tokens, ignore_eos=True)
        return (
            [list(request.output_ids)[:tokens] for request in requests],
            sum(request.spec_verify_ct for request in requests),
            sum(request.spec_num_correct_drafts for request in requests),
            (free, self.free_slots()),
        )

    def gaps(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[float]]:
        """How far each output token is from greedy: the logit of this model's first choice after the same tokens, by one
        prefill over prompt and output, minus the token's. 0: the first choice; near 0: a tie, as bfloat16 has many.
        """
        everything = self.scheduler.model_config.vocab_size
        requests = self.finish([
            self.submit([*prompt, *output], temperature=0, max_new_tokens=1, return_logprob=True,
                        top_logprobs_num=everything, logprob_start_len=len(prompt) - 1)
            for prompt, output in zip(prompts, outputs)
        ])  # fmt: skip
        found = []
        for request, output in zip(requests, outputs):
            values = request.logprob.input_top_logprobs_val[-len(output) :]
            tokens = request.logprob.input_top_logprobs_idx[-len(output) :]
            found.append([v[0] - v[list(t).index(token)] for v, t, token in zip(values, tokens, output)])
        return found

    def abort(self, request) -> None:
        """As a client that hangs up."""
        from sglang.srt.managers.io_struct import AbortReq

        self.aborted.add(request.rid)  # it need not get a finish reason: it may never have run
        self.scheduler.abort_request(AbortReq(rid=request.rid))

    def finish(self, requests: list, each_turn=lambda: True) -> list:
        """Runs the event loop until these requests are finished, each_turn(), called at every turn and free to submit
        more into `requests` and to abort, says True, and nothing is in flight.
        """
        scheduler = self.scheduler

        def ingest_requests():
            # An idle turn after the last result: the loop then has checked its memory.
            complete = each_turn()
            idle = scheduler.last_batch is None
            ended = all(r.finished() or r.rid in self.aborted for r in requests)
            scheduler.gracefully_exit = complete and idle and ended

        scheduler.ingest_requests = ingest_requests
        scheduler.gracefully_exit = False
        scheduler.run_event_loop()
        return requests

    def free_slots(self) -> int:
        """Slots of the KV pool that no request holds: free ones and those that the radix cache may give up."""
        scheduler = self.scheduler
        return scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()


_ports = random.SystemRandom().sample(range(24000, 32000), 8000)  # below the ephemeral ones


def unused_port() -> int:
    """A port that nobody listens at, and that this process hands out once.

    Children that start together, of this process or of another, would else take the same: they bind it much later.
    """
    while _ports:
        port = _ports.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port from 24000 to 32000 is free")


class Child:
    """A SchedulerHost in a process of its own, running job(host, *args); the result must pickle. A job with a method
    `before` has it called before the host is made.

    On a CPU it is forked, so that the imports of SGLang (twenty seconds) are paid once, by the test's process. CUDA
    does not survive a fork: there each child imports for itself, and children can run at the same time.
    """

    def __init__(self, arguments: dict, job, *args):
        import multiprocessing

        arguments = {"nccl_port": unused_port()} | arguments
        forked = arguments.get("device", "cpu") == "cpu"
        if forked:
            import sglang.srt.managers.scheduler  # noqa: F401  imported before the fork
            import sglang.srt.models.registry  # noqa: F401
            import sglang.srt.speculative.dflash_worker_v2  # noqa: F401

            torch.set_num_threads(1)  # a forked child must not inherit a thread pool
        context = multiprocessing.get_context("fork" if forked else "spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_child, args=(theirs, arguments, job, args))
        self._process.start()
        theirs.close()

    def result(self, seconds: float | None = None):
        """Waits for the job, at most `seconds`; then the child is killed.

        Raises:
            RuntimeError: the child failed or was killed; the text is its traceback or says so.
        """
        try:
            if not self._pipe.poll(seconds):
                self._process.kill()
            done, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            done, result = False, f"the child died with exit code {self._process.exitcode}"
        self._process.join()
        if not done:
            raise RuntimeError(result)
        return result


def _run_child(pipe, arguments, job, args) -> None:
    import traceback

    try:
        getattr(job, "before", lambda: None)()
        pipe.send((True, job(SchedulerHost(**arguments), *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # threads of the scheduler that wait for requests would keep the process


def in_child(arguments: dict, job, *args):
    """The result of a Child."""
    return Child(arguments, job, *args).result()


def in_ranks(arguments: dict, job, *args) -> list:
    """The results of the Children of a tensor-parallel group, by rank. They run the same job."""
    arguments = arguments | {"nccl_port": unused_port()}
    children = [Child(arguments | {"rank": rank}, job, *args) for rank in range(arguments["tp_size"])]
    return [child.result() for child in children]
