"""What DDTREE makes of the server's arguments, what it refuses, and that upstream's contracts hold for it."""

import json
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel, get_spec, override_platform, publish
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.ddtree import contract
from sglang.srt.speculative.dflash_utils import validate_dflash_request
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="unit")

load_plugins()

MODEL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=128, intermediate_size=256,
    num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=16,
    max_position_embeddings=512, dtype="float32",
)  # fmt: skip


class ArgumentsCase(CustomTestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.model, self.drafter = Path(folder.name, "model"), Path(folder.name, "drafter")
        for path, config in (
            (self.model, MODEL),
            (
                self.drafter,
                MODEL | dict(architectures=["DFlashDraftModel"], model_type="qwen3", block_size=8),
            ),
        ):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))

    def resolve(self, **arguments):
        """The resolved arguments of a CPU server with DDTREE."""
        args = ServerArgs(
            **dict(
                model_path=str(self.model), speculative_algorithm="DDTREE", device="cpu",
                speculative_draft_model_path=str(self.drafter), attention_backend="torch_native",
                skip_tokenizer_init=True,
            ) | arguments
        )  # fmt: skip
        args.resolve_once()
        return args


class TestWidths(ArgumentsCase):
    def widths(self, **arguments):
        publish(self.resolve(**arguments), role="scheduler")
        spec = get_spec()
        return (
            spec.speculative_num_draft_tokens,
            spec.speculative_dflash_block_size,
            spec.speculative_eagle_topk,
        )

    def test_defaults(self):
        """F from the drafter's config."""
        self.assertEqual(self.widths(), (contract.DEFAULT_ROWS, 8, contract.DEFAULT_CANDIDATES))

    def test_given(self):
        given = dict(
            speculative_num_draft_tokens=64, speculative_dflash_block_size=12, speculative_eagle_topk=4
        )
        self.assertEqual(self.widths(**given), (64, 12, 4))

    def test_block_is_cut_to_the_tree(self):
        self.assertEqual(self.widths(speculative_num_draft_tokens=4)[:2], (4, 4))

    def test_one_candidate_makes_a_chain(self):
        self.assertEqual(self.widths(speculative_eagle_topk=1), (8, 8, 1))

    def test_rows_are_cut_to_the_prefixes_there_are(self):
        self.assertEqual(
            self.widths(speculative_dflash_block_size=3, speculative_eagle_topk=2), (1 + 2 + 4, 3, 2)
        )

    def test_verify_width(self):
        """The drafter's forwards are F wide, the target's N."""
        self.widths(speculative_num_draft_tokens=64)
        algorithm = SpeculativeAlgorithm.from_string("DDTREE")
        self.assertEqual(algorithm.get_num_tokens_per_req_for_target_verify(64, True), 8)
        self.assertEqual(algorithm.get_num_tokens_per_req_for_target_verify(64, False), 64)

    def test_command_line(self):
        argv = ["--model-path", str(self.model), "--speculative-ddtree-verify", "validate",
                "--speculative-ddtree-spine", "keep"]  # fmt: skip
        args = prepare_server_args(argv)
        self.assertEqual(
            (args.speculative_ddtree_verify, args.speculative_ddtree_spine), ("validate", "keep")
        )


class TestRefusals(ArgumentsCase):
    def refused(self, text, **arguments):
        with self.assertRaisesRegex(ValueError, f"^DDTREE: {text}"):
            self.resolve(**arguments)

    def test_drafter_is_needed(self):
        self.refused("--speculative-draft-model-path", speculative_draft_model_path=None)

    def test_widths(self):
        self.refused(
            "--speculative-num-draft-tokens: expected 2 to 256, got 257", speculative_num_draft_tokens=257
        )
        self.refused(
            "--speculative-dflash-block-size: expected 2 to 33, got 34", speculative_dflash_block_size=34
        )
        self.refused("--speculative-eagle-topk: expected 1 to 32, got 33", speculative_eagle_topk=33)

    def test_draft_attention_backend_on_cuda(self):
        """FlashAttention's would take the block for a tree, as K is above 1."""
        resolved = resolved_view(self.resolve())

        class Cuda:
            device, attention_backend, speculative_draft_attention_backend = "cuda", "triton", "triton"

            def __getattr__(self, name):
                return getattr(resolved, name)

        contract.refuse_server_args(Cuda())
        Cuda.speculative_draft_attention_backend = "fa3"
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: --speculative-draft-attention-backend: expected 'triton' on cuda, got 'fa3'"
        ):
            contract.refuse_server_args(Cuda())

    def test_verify_mode_without_triton(self):
        self.refused("--speculative-ddtree-verify: expected 'native'", speculative_ddtree_verify="validate")

    def test_grammars_that_cannot_step_back(self):
        """At the first token that outlines allows, its rollback would end the server."""
        self.refused("--grammar-backend: expected .*, got 'outlines'", grammar_backend="outlines")
        self.resolve(grammar_backend="llguidance")

    def test_features(self):
        for flag, value in (
            ("pp_size", 2),
            ("speculative_draft_window_size", 64),
            ("enable_return_routed_experts", True),
            ("enable_return_indexer_topk", True),
            ("speculative_accept_threshold_acc", 0.9),
            ("speculative_use_rejection_sampling", True),
            ("speculative_token_map", "hot.pt"),
            ("speculative_num_steps", 5),
            ("speculative_draft_attention_backend", "triton"),
        ):
            with self.subTest(flag):
                self.refused(f"--{flag.replace('_', '-')}: expected", **{flag: value})

    def test_window_layers_get_no_pool_of_their_own(self):
        """gpt-oss and its like: tree rows move in one slot of all layers; and the user is told what it costs."""
        with patch.object(contract, "model_config_of", lambda args: SimpleNamespace(is_hybrid_swa=True)):
            with self.assertLogs(contract.logger, "WARNING") as logs:
                self.assertTrue(resolved_view(self.resolve()).disable_hybrid_swa_memory)
        self.assertIn("keep the KV of the whole context", logs.output[0])
        with self.assertNoLogs(contract.logger, "WARNING"):
            self.resolve()


class TestVerifyMemory(ArgumentsCase):
    """What the default of --mem-fraction-static leaves for the verify, on a device of 80 GB."""

    capacity = 80 * 1024.0  # MB

    def fraction(self, **arguments):
        """Resolved; and upstream's own, by the same arguments without DDTREE."""
        common = dict(device="cuda", attention_backend="triton", max_running_requests=48) | arguments
        with (
            patch("sglang.srt.utils.common.get_device_memory_capacity", lambda device=None: self.capacity),
            patch(
                "sglang.srt.arg_groups.memory_hook.get_device_memory_capacity",
                lambda device=None: self.capacity,
            ),
        ):
            own = resolved_view(self.resolve(**common)).mem_fraction_static
            rows = ("speculative_num_draft_tokens", "speculative_eagle_topk")
            plain = dict.fromkeys(("speculative_algorithm", "speculative_draft_model_path", *rows))
            return own, resolved_view(self.resolve(**common | plain)).mem_fraction_static

    def set_vocabulary(self, size):
        (self.model / "config.json").write_text(json.dumps(MODEL | dict(vocab_size=size)))

    def test_logits(self):
        self.set_vocabulary(152_000)
        for rows in (32, 64):
            own, upstream = self.fraction(speculative_num_draft_tokens=rows)
            logits = 48 * rows * 152_000 * (4 + 2) / 2**20
            self.assertAlmostEqual(upstream - own, logits / self.capacity, delta=0.001)

    def test_activations_past_a_prefill_chunk(self):
        arguments = dict(speculative_num_draft_tokens=256, speculative_eagle_topk=32, max_running_requests=64)
        own, upstream = self.fraction(chunked_prefill_size=4096, **arguments)
        self.assertAlmostEqual(upstream - own, (64 * 256 - 4096) * 1.5 / self.capacity, delta=0.001)

    def test_a_named_one_stays(self):
        self.set_vocabulary(152_000)
        self.assertEqual(self.fraction(mem_fraction_static=0.8)[0], 0.8)

    def test_where_the_pool_is_sized_after_capture(self):
        self.set_vocabulary(152_000)
        with patch.object(contract, "post_capture_kv_sizing_planned", lambda args: True):
            own, upstream = self.fraction()
        self.assertEqual(own, upstream)

    def test_more_than_there_is(self):
        self.set_vocabulary(152_000)
        with self.assertRaisesRegex(ValueError, "^DDTREE: --max-running-requests x .* got 512 x 256"):
            self.fraction(
                max_running_requests=512, speculative_num_draft_tokens=256, speculative_eagle_topk=32
            )


class TestAttentionBackends(ArgumentsCase):
    """Which backend prefills, which verifies, and what is refused; on CUDA, which the arguments do not need to be there."""

    def resolve(self, **arguments):
        return resolved_view(
            super().resolve(
                **dict(device="cuda", attention_backend=None, mem_fraction_static=0.5) | arguments
            )
        )

    def check(self, view, prefill, page_size=1):
        self.assertEqual(attention_backends_of(view), (prefill, "triton"))
        # Models read this one: gpt-oss for the dtype of its sinks.
        self.assertEqual(view.attention_backend, prefill)
        self.assertEqual(view.speculative_attention_mode, "decode")
        self.assertEqual(view.speculative_draft_attention_backend, "triton")
        self.assertEqual(view.page_size, page_size)

    def test_named_for_all(self):
        self.check(self.resolve(attention_backend="flashinfer"), "flashinfer")
        self.check(self.resolve(attention_backend="flashmla"), "flashmla", page_size=64)
        self.check(self.resolve(attention_backend="fa3", page_size=16), "fa3", page_size=16)

    def test_named_for_prefill(self):
        for arguments in ({}, {"decode_attention_backend": "triton"}, {"attention_backend": "triton"}):
            self.check(self.resolve(prefill_attention_backend="fa3", **arguments), "fa3")

    def test_on_blackwell(self):
        """Upstream's rules for a backend have run before ours: its pages, its own refusals."""
        with override_platform(is_sm100=True, is_blackwell=True):
            self.check(self.resolve(attention_backend="trtllm_mha"), "trtllm_mha", page_size=64)
            self.check(self.resolve(prefill_attention_backend="trtllm_mha"), "trtllm_mha", page_size=64)
            self.check(self.resolve(attention_backend="trtllm_mla"), "trtllm_mla", page_size=64)
            self.check(self.resolve(attention_backend="fa4"), "fa4", page_size=128)
        with override_platform(is_sm120=True, is_blackwell=True):
            self.check(self.resolve(attention_backend="trtllm_mha", page_size=32), "trtllm_mha", page_size=32)

    def test_triton_where_none_is_named(self):
        self.check(self.resolve(), "triton")
        self.check(self.resolve(decode_attention_backend="triton"), "triton")

    def test_what_upstream_falls_back_to(self):
        self.check(self.resolve(attention_backend="fa3", kv_cache_dtype="fp8_e5m2"), "triton")

    def choose(self, device="cuda", chosen=None, **asked):
        """The rules alone. chosen: by upstream, for this model or device."""
        raw = dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
        raw |= asked
        args = SimpleNamespace(**raw | (chosen or {}), device=device, _raw_input=raw)
        contract.choose_attention_backends(args)
        return attention_backends_of(args)

    def test_upstream_s_choice_for_a_device_is_not_the_user_s(self):
        self.assertEqual(self.choose(chosen={"attention_backend": "trtllm_mha"}), ("triton", "triton"))
        self.assertEqual(self.choose(chosen={"decode_attention_backend": "flashinfer"}), ("triton", "triton"))
        self.assertEqual(
            self.choose(device="cpu", chosen={"attention_backend": "intel_amx"}),
            ("torch_native", "torch_native"),
        )

    def test_refused(self):
        for argument in ("attention_backend", "prefill_attention_backend"):
            for name, reason in (
                *((name, "it keeps more of a token than K and V") for name in ("dsa", "nsa", "qsa", "dsv4")),
                *((name, "SGLang does not run it beside") for name in ("flex_attention", "hpc_ops")),
                ("cutedsl_mla", "it only decodes; trtllm_mla prefills"),
                ("aiter", "not for this device"),
            ):
                flag = argument.replace("_", "-")
                expected = (
                    f"^DDTREE: --{flag}: expected one of .*'trtllm_mha'.* on cuda, got '{name}': {reason}"
                )
                with self.subTest(argument, name=name), self.assertRaisesRegex(ValueError, expected):
                    self.choose(**{argument: name})

    def test_refused_where_upstream_has_put_another_in_its_place(self):
        """The user named a decoding backend for all; upstream prefills with trtllm_mla then."""
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: --attention-backend: .* got 'cutedsl_mla': it only decodes"
        ):
            self.choose(attention_backend="cutedsl_mla", chosen={"prefill_attention_backend": "trtllm_mla"})

    def test_refused_where_the_model_can_do_with_no_other(self):
        with self.assertRaisesRegex(ValueError, "^DDTREE: --attention-backend: .* got 'dsa': it keeps more"):
            self.choose(chosen={"attention_backend": "dsa"})

    def test_refused_on_a_cpu(self):
        with self.assertRaisesRegex(
            ValueError, r"expected one of \['torch_native'\] on cpu, got 'intel_amx'"
        ):
            self.choose(device="cpu", attention_backend="intel_amx")

    def test_decoding_backend(self):
        for device, base in (("cuda", "triton"), ("cpu", "torch_native")):
            with self.assertRaisesRegex(
                ValueError,
                f"^DDTREE: --decode-attention-backend: expected '{base}' on {device}, got 'fa3': tree verify",
            ):
                self.choose(device=device, attention_backend=base, decode_attention_backend="fa3")


class TestRequests(ArgumentsCase):
    def request(self, **parameters):
        neutral = dict(custom_logit_processor=None, return_sampling_mask=False, return_hidden_states=False)
        return SimpleNamespace(**neutral | parameters)

    def test_refused_by_name_through_the_seam(self):
        publish(self.resolve(), role="scheduler")
        self.assertIsNone(validate_dflash_request(self.request(), False))
        for name, value in (
            ("custom_logit_processor", "x"), ("return_sampling_mask", True), ("return_hidden_states", True),
        ):  # fmt: skip
            with self.subTest(name):
                self.assertIn(name, validate_dflash_request(self.request(**{name: value}), False))

    def test_a_refused_processor_does_not_run(self):
        publish(self.resolve(), role="scheduler")
        request = self.request(custom_logit_processor="x")
        validate_dflash_request(request, False)
        self.assertIsNone(request.custom_logit_processor)

    def test_other_algorithms_are_left_alone(self):
        publish(self.resolve(speculative_algorithm=None, speculative_draft_model_path=None), role="scheduler")
        self.assertIsNone(validate_dflash_request(self.request(custom_logit_processor="x"), False))


class TestUpstreamContract(CustomTestCase):
    def test_every_method_of_a_builtin_algorithm_is_there(self):
        """What the scheduler calls on a builtin algorithm, beyond upstream's own guard of is_* and supports_*."""
        names = {name for name in vars(SpeculativeAlgorithm) if not name.startswith("_")}
        names -= {"from_string", "register", "get_platform_worker_cls"} | set(
            SpeculativeAlgorithm.__members__
        )
        self.assertEqual(set(), names - set(dir(contract.DDTreeAlgorithm)))


class TestBlockMask(CustomTestCase):
    def test_chain_ancestors(self):
        from sglang.srt.layers.attention.ddtree_backend import chain_ancestors

        for rows in (1, 5, 64, 65, 130):
            for causal in (True, False):
                words = chain_ancestors(rows, causal, "cpu")
                bit = torch.arange(rows)
                seen = (words[:, bit // 64] >> (bit % 64)) & 1
                expected = torch.ones(rows, rows, dtype=torch.int64)
                self.assertTrue(torch.equal(seen, expected.tril() if causal else expected))


class TestFullMask(CustomTestCase):
    """The mask of the base backend's kernels, where the host does not know yet that requests have passed the context."""

    rows, context = 70, 100

    def setUp(self):
        from sglang.srt.layers.attention.ddtree_backend import TreeVerifyMixin
        from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask

        class Base:
            def init_cuda_graph_state(self, max_bs, max_num_tokens):
                self._verify_mask = maybe_create_verify_mask(
                    is_draft_runner=False, skip_prefill=False, max_bs=max_bs, num_draft_tokens=TestFullMask.rows,
                    max_context_len=TestFullMask.context, device="cpu", is_read=True, dtype=torch.uint8,
                )  # fmt: skip

            def init_forward_metadata(self, forward_batch):
                pass

            def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
                pass

        generator = torch.Generator().manual_seed(3)
        self.bits = torch.randint(2, (2 * self.rows, self.rows), generator=generator)
        place = torch.ones((), dtype=torch.int64) << torch.arange(64)
        padded = torch.nn.functional.pad(self.bits, (0, 128 - self.rows))
        self.words = (padded.view(-1, 2, 64) * place).sum(-1)
        self.backend = type("Backend", (TreeVerifyMixin, Base), {})()
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, self.context + 141))
        )
        self.backend._install(runner=runner, mode="triton", rows=self.rows)

    def batch(self, prefix_lens):
        bs = len(prefix_lens)
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            spec_info=SimpleNamespace(
                ancestors=self.words[: bs * self.rows], draft_token_num=self.rows, custom_mask=None
            ),
            batch_size=bs,
            seq_lens=torch.tensor(prefix_lens),
            req_pool_indices=torch.arange(bs),
        )

    def check(self, mask, prefix_lens):
        start = 0
        for i, prefix in enumerate(prefix_lens):
            cells = self.rows * (prefix + self.rows)
            tree = mask[start : start + cells].view(self.rows, -1)[:, prefix:]
            self.assertTrue(torch.equal(tree.long(), self.bits[i * self.rows : (i + 1) * self.rows]))
            start += cells

    def test_without_a_graph(self):
        for prefix_lens in ([7, 31], [self.context + self.rows] * 2):
            batch = self.batch(prefix_lens)
            self.backend.init_forward_metadata(batch)
            self.check(batch.spec_info.custom_mask, prefix_lens)

    def test_in_a_graph(self):
        self.backend.init_cuda_graph_state(2, 2 * self.rows)
        for prefix_lens in ([self.context + self.rows] * 2, [7, 31], [5]):
            self.backend.init_forward_metadata_out_graph(self.batch(prefix_lens))
            self.check(self.backend._verify_mask.buffer, prefix_lens)


class TestGraphBuffers(CustomTestCase):
    """What graphs over upstream's Triton backend reserve: its own class, without a device."""

    context, requests, window = 1000, 4, 32

    def backend(self, *, rows=None, mode="native", **attributes):
        """The target's backend for trees of `rows` rows; the drafter's if None."""
        from sglang.srt.layers.attention.ddtree_backend import with_prefix_per_request, with_tree_verify
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        backend = TritonAttnBackend.__new__(TritonAttnBackend)
        backend.__dict__ |= dict(
            device="cpu", dllm_attention=None, num_head=2, max_kv_splits=8, v_head_dim=64, swa_v_head_dim=None,
            lean_total_programs=1, lean_block_m=16, max_context_len=self.context, num_draft_tokens=rows,
            is_draft_runner=rows is None, skip_prefill=False, sliding_window_size=self.window,
            use_sliding_window_kv_pool=False, target_verify_num_tokens_per_req=rows,
        ) | attributes  # fmt: skip
        for name in ("kv_indptr", "window_kv_indptr", "qo_indptr", "mask_indptr"):
            setattr(backend, name, torch.zeros(self.requests + 1, dtype=torch.int64))
        table = torch.zeros(self.requests + 1, self.context + 2 * (rows or 0) + 1, dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu", model=torch.nn.ModuleList(), dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16,
            req_to_token_pool=SimpleNamespace(req_to_token=table), prefill_attention_backend_str="triton",
            model_config=SimpleNamespace(num_hidden_layers=2),
        )  # fmt: skip
        if rows is None:
            return with_prefix_per_request(backend, runner)
        return with_tree_verify(backend, runner, mode=mode, rows=rows)

    def reserved(self, rows, **options):
        """Bytes of the buffers that init_cuda_graph_state makes."""
        backend = self.backend(rows=rows, **options)
        before = set(backend.__dict__)
        backend.init_cuda_graph_state(self.requests, self.requests * (rows or 8))
        made = [value for name, value in backend.__dict__.items() if name not in before]
        return sum(value.nbytes for value in made if isinstance(value, torch.Tensor))

    def test_rows_do_not_multiply_them(self):
        """Beside the ancestors, a row adds its share of the longest prefix of each request."""
        few, many = self.reserved(8), self.reserved(64)
        slots = self.requests * 2 * (64 - 8) * 8  # of two trees' width more, int64, and the window's
        self.assertEqual(many - few, 2 * slots)
        self.assertLess(many, 4 * self.requests * self.context * 8)

    def test_the_drafter_has_them_by_request(self):
        self.assertLess(self.reserved(None), 4 * self.requests * self.context * 8)

    def test_native_has_no_mask(self):
        for mode, expected in (("native", False), ("triton", True), ("validate", True)):
            backend = self.backend(rows=8, mode=mode)
            backend.init_cuda_graph_state(self.requests, self.requests * 8)
            self.assertEqual(backend._verify_mask is not None, expected)
            self.assertEqual(backend.num_draft_tokens, 8)

    def test_the_longest_prefixes_fit(self):
        """Of requests that are past the context: the host does not know yet that they have ended."""
        from sglang.srt.layers.attention import triton_backend

        rows = 8
        backend = self.backend(rows=rows)
        backend.init_cuda_graph_state(self.requests, self.requests * rows)
        lens = torch.full((self.requests,), self.context + rows)

        class Translator:
            def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out):
                for r, length in enumerate(seq_lens.tolist()):
                    out[indptr[r] : indptr[r + 1]] = torch.arange(length) + 10_000 * r

        backend.kv_index_translator = Translator()
        backend.token_to_kv_pool = None
        spec_info = SimpleNamespace(custom_mask=None, num_tokens_per_req=rows)
        window = None, None, None, torch.zeros(self.requests, dtype=torch.int32)
        with patch.object(triton_backend, "update_sliding_window_buffer", lambda *args, **options: window):
            backend._update_target_verify_buffers(
                None, self.requests, lens, spec_info, torch.arange(self.requests)
            )
        indptr, slots = backend.kv_indptr, backend.cuda_graph_kv_indices
        for r in range(self.requests):
            own = slots[indptr[r] : indptr[r + 1]]
            self.assertEqual(own.tolist(), list(range(10_000 * r, 10_000 * r + self.context + rows)))


class TestTreeAttention(CustomTestCase):
    """What the backend hands the ops, on a CPU: GQA of 4 heads over 2, or MLA of 2."""

    rows, prefix = 5, 7

    def check(self, *, mla=False, sinks=None, store=torch.float32, scales=None):
        """Writes the rows' KV and attends to it, as a layer does; against softmax attention.

        Args:
            store: dtype of the KV cache.
            scales: of K and V, as an FP8 checkpoint's layer has them.
        """
        from sglang.srt.layers.attention.ddtree_backend import (
            TorchNativeTreeVerify,
            chain_ancestors,
            not_covered,
        )
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

        heads, kv_heads, d_qk, d_v = (2, 1, 576, 512) if mla else (4, 2, 64, 64)
        end = self.prefix + self.rows
        common = dict(
            size=end, page_size=1, dtype=store, layer_num=1, device="cpu", enable_memory_saver=False
        )
        pool = (
            MLATokenToKVPool(**common, kv_lora_rank=512, qk_rope_head_dim=64)
            if mla
            else MHATokenToKVPool(**common, head_num=kv_heads, head_dim=d_qk)
        )
        layer = RadixAttention(heads, d_qk, d_qk**-0.5, num_kv_heads=kv_heads, layer_id=0, v_head_dim=d_v)
        if scales is not None:
            layer.k_scale, layer.v_scale = (torch.tensor(scale) for scale in scales)
            layer.k_scale_float, layer.v_scale_float = scales
        generator = torch.Generator().manual_seed(5)
        q, k, v = (
            torch.randn(n, h, d, generator=generator)
            for n, h, d in ((self.rows, heads, d_qk), (end, kv_heads, d_qk), (end, kv_heads, d_v))
        )
        if mla:
            v = k[..., :d_v]
        runner = SimpleNamespace(
            device="cpu",
            model=torch.nn.ModuleList([layer]),
            dtype=torch.float32,
            kv_cache_dtype=store,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, end)),
        )
        self.assertEqual(not_covered(runner), [])
        backend = TorchNativeTreeVerify()
        backend._install(runner=runner, mode="native", rows=self.rows)
        backend.token_to_kv_pool = pool
        backend.tree_ancestors = chain_ancestors(self.rows, True, "cpu")
        backend.tree_prefix_lens = torch.tensor([self.prefix], dtype=torch.int32)
        backend.tree_qo_indptr = torch.tensor([0, self.rows], dtype=torch.int32)
        backend.tree_kv_indptr = torch.tensor([0, self.prefix], dtype=torch.int32)
        backend.tree_kv_indices = torch.arange(self.prefix)
        batch = SimpleNamespace(spec_info=SimpleNamespace(draft_token_num=self.rows))
        for slots in (torch.arange(self.prefix), torch.arange(self.prefix, end)):  # the rows' own last
            batch.out_cache_loc = slots
            with get_parallel().override(dcp_enabled=False):
                backend._write_kv(k[slots].clone(), v[slots].clone(), layer, batch)
        options = {} if sinks is None else dict(sinks=sinks)
        o = backend._tree_attention(q, layer, batch, **options).view(self.rows, heads, d_v)

        group = heads // kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("thd,shd->ths", q, keys) * d_qk**-0.5
        seen = torch.ones(self.rows, end, dtype=torch.bool).tril(self.prefix)
        logits = logits.masked_fill(~seen[:, None], -float("inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[None, :, None].expand(self.rows, -1, 1)], -1)
        expected = torch.einsum("ths,shd->thd", logits.softmax(-1)[..., :end], values)
        # float8 has three bits of mantissa: 6% of a number at most, the errors of K and V averaged by the softmax
        tolerance = dict(atol=0.15, rtol=0) if store == torch.float8_e4m3fn else dict(atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(o, expected, **tolerance)

    def test_plain(self):
        for mla in (False, True):
            self.check(mla=mla)

    def test_sinks_in_bfloat16(self):
        """As gpt-oss keeps them; the op takes float32."""
        self.check(sinks=torch.tensor([0.5, 2.0, -1.0, 4.0], dtype=torch.bfloat16))

    def test_scales_of_an_fp8_checkpoint(self):
        """Of 1, whether or not the cache is in float8; others only where the pool divides by them."""
        for mla in (False, True):
            for store in (torch.float32, torch.float8_e4m3fn):
                with self.subTest(mla=mla, store=store):
                    self.check(mla=mla, store=store, scales=(1.0, 1.0))
        self.check(store=torch.float8_e4m3fn, scales=(0.5, 0.25))


class TestTargetModel(CustomTestCase):
    """What the worker reads off the target's layers."""

    def layers(self, *layers):
        """A model of RadixAttention layers of (heads, KV heads, head size, window)."""
        from sglang.srt.layers.radix_attention import RadixAttention

        return torch.nn.ModuleList(
            RadixAttention(heads, size, 1.0, num_kv_heads=kv_heads, layer_id=i, sliding_window_size=window)
            for i, (heads, kv_heads, size, window) in enumerate(layers)
        )

    def refuse(self, model, **runner):
        from sglang.srt.speculative.ddtree.worker import DDTreeWorker

        worker = DDTreeWorker.__new__(DDTreeWorker)
        worker.model_runner = SimpleNamespace(model=model, model_config=None, **runner)
        worker.selector, worker.lilicorr, worker._is_domino = None, None, False
        with patch("sglang.srt.speculative.ddtree.worker.mambaish_config", lambda config: None):
            worker._refuse_models()

    def test_layers_of_several_kv_shapes_are_refused(self):
        """Gemma 4 and MiMo-V2: one pool cannot hold them."""
        alike = self.layers((8, 2, 64, -1), (16, 2, 64, 127))
        self.refuse(alike, use_mla_backend=False)
        differing = self.layers((8, 2, 64, -1), (8, 4, 128, 127))
        with self.assertRaisesRegex(
            ValueError,
            r"^DDTREE: target model: .* of one shape .* got .* \[\(2, 64, 64\), \(4, 128, 128\)\]: serve",
        ):
            self.refuse(differing, use_mla_backend=False)
        self.refuse(differing, use_mla_backend=True)  # absorbed and not: one latent

    def test_widest_window(self):
        from sglang.srt.layers.attention.ddtree_backend import widest_window

        self.assertIsNone(widest_window(self.layers((8, 2, 64, -1), (8, 2, 64, None))))
        self.assertEqual(widest_window(self.layers((8, 2, 64, 511), (8, 2, 64, -1), (8, 2, 64, 127))), 511)


class TestPool(CustomTestCase):
    def test_packed_numbers_are_refused(self):
        """Their scales lie in buffers of their own."""
        from sglang.srt.speculative.ddtree.verify import kv_buffers

        def pool(**fields):
            rows = [torch.zeros(5, 2, 4)] * 2
            return type("MHATokenToKVPool", (), dict(k_buffer=rows, v_buffer=rows, **fields))()

        self.assertEqual(kv_buffers(pool(is_quantized_kv_cache=False)).table.shape, (4, 3))
        with self.assertRaisesRegex(ValueError, "^DDTREE: --kv-cache-dtype: .*fp4_mx_block16"):
            kv_buffers(pool(is_quantized_kv_cache=True, quant_method=SimpleNamespace(name="fp4_mx_block16")))

    def test_other_layouts_are_refused(self):
        """A buffer's row is then a page, and a slot's numbers lie apart in it."""
        from sglang.srt.speculative.ddtree.verify import kv_buffers

        pool = type("MHATokenToKVPool", (), dict(kv_cache_layout="hnd"))()
        with self.assertRaisesRegex(ValueError, "^DDTREE: KV pool: expected the layout 'nhd'.*'hnd'"):
            kv_buffers(pool)

    def test_other_pools_are_refused(self):
        from sglang.srt.speculative.ddtree.verify import kv_buffers

        with self.assertRaisesRegex(
            ValueError, "^DDTREE: KV pool: expected .* got SWAKVPool, .*without DDTREE"
        ):
            kv_buffers(type("SWAKVPool", (), {})())


class TestSplitBackend(CustomTestCase):
    """The front in the decoding half of upstream's split backend."""

    def test_what_torch_does_not_prefill(self):
        """MLA at all; caps and scales, which it would leave out."""
        from sglang.srt.layers.attention.ddtree_backend import torch_lacks, with_tree_verify
        from sglang.srt.layers.radix_attention import RadixAttention

        def runner(*, mla=False, cap=0.0, scale=None, cache=torch.float8_e4m3fn):
            layer = RadixAttention(4, 64, 1.0, num_kv_heads=2, layer_id=0, logit_cap=cap)
            layer.k_scale_float = layer.v_scale_float = scale
            return SimpleNamespace(
                use_mla_backend=mla, prefill_attention_backend_str="torch_native", kv_cache_dtype=cache,
                model=torch.nn.ModuleList([layer]),
            )  # fmt: skip

        for options in ({}, {"scale": 1.0}, {"scale": 0.5, "cache": torch.bfloat16}):
            self.assertEqual(torch_lacks(runner(**options)), [])
        for options, text in (
            ({"mla": True}, "MLA"), ({"cap": 50.0}, "capped attention logits"), ({"scale": 0.5}, "scales of K and V"),
            ({"mla": True, "cap": 50.0}, "MLA and capped"),
        ):  # fmt: skip
            with self.assertRaisesRegex(
                ValueError, f"^DDTREE: --prefill-attention-backend: .* {text}.* got 'torch_native'"
            ):
                with_tree_verify(None, runner(**options), mode="native", rows=8)

    def test_a_half_without_a_front_is_refused(self):
        from sglang.srt.layers.attention.ddtree_backend import HybridAttnBackend, with_tree_verify

        split = HybridAttnBackend.__new__(HybridAttnBackend)
        split.decode_backend = SimpleNamespace()
        runner = SimpleNamespace(
            prefill_attention_backend_str="fa3", model=torch.nn.Module(), device="cpu",
            dtype=torch.float32, kv_cache_dtype=torch.float32,
        )  # fmt: skip
        with self.assertRaisesRegex(ValueError, "^DDTREE: target model: .* got SimpleNamespace"):
            with_tree_verify(split, runner, mode="native", rows=8)


class TestCoverage(CustomTestCase):
    """What the tree ops do not cover is named; then verify falls back to the base backend, or is refused on a CPU."""

    def reasons(
        self,
        *,
        shape=(9, 3, 64, 64),
        kv=torch.bfloat16,
        device="cuda",
        dtype=torch.bfloat16,
        xai=-1,
        scale=None,
    ):
        from sglang.srt.layers.attention import ddtree_backend

        layer = SimpleNamespace(
            **dict(zip(("tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim"), shape)),
            xai_temperature_len=xai,
            k_scale_float=scale,
            v_scale_float=scale,
        )
        runner = SimpleNamespace(model=None, device=device, dtype=dtype, kv_cache_dtype=kv)
        with patch.object(ddtree_backend, "verify_layers", lambda model: [layer]):
            return ddtree_backend.not_covered(runner)

    def test_covered(self):
        for options in (
            {},
            {"shape": (16, 1, 576, 512)},
            {"kv": torch.float8_e4m3fn},
            {"scale": 1.0},
            {"kv": torch.float8_e4m3fn, "scale": 0.5},
        ):
            self.assertEqual(self.reasons(**options), [])
        self.assertEqual(self.reasons(device="cpu", dtype=torch.float32, kv=torch.float32), [])

    def test_not_covered(self):
        for options, text in (
            ({"shape": (9, 3, 80, 80)}, "80, 80"),
            ({"shape": (9, 3, 192, 128)}, "192, 128"),
            ({"kv": torch.float8_e5m2}, "float8_e5m2"),
            ({"dtype": torch.float32, "kv": torch.float32}, "queries in torch.float32"),
            ({"xai": 1024}, "temperature"),
            ({"scale": 0.5}, "scales of K and V"),
            ({"scale": 0.5, "kv": torch.float8_e4m3fn, "shape": (16, 1, 576, 512)}, "scales of K and V"),
        ):
            with self.subTest(text):
                (reason,) = self.reasons(**options)
                self.assertIn(text, reason)


class TestDifference(CustomTestCase):
    """Reading what a validating verify accumulated."""

    def test_names_layer_and_request_and_skips_padding(self):
        from sglang.srt.speculative.ddtree.metrics import Difference

        table = torch.zeros(3, 5)
        table[1, 0] = 9.0  # upstream pads a graph's batch with pool row 0
        table[2, 4] = 0.5
        found = Difference(table, {4: "request-a"})
        self.assertEqual((found.value, found.layer, found.request), (0.5, 2, "request-a"))


if __name__ == "__main__":
    unittest.main()
