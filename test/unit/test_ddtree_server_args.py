"""Which server arguments DDTREE refuses, and how it fills in the rest."""

import argparse
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.arg_groups import lora_hook
from sglang.srt.arg_groups.argument_refused import ArgumentRefused
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.runtime_context import get_spec, override_platform, publish
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.ddtree import server_args, target
from sglang.test.ci.ci_register import register_cpu_ci
from support.ddtree_arguments import DRAFTER, MODEL, ArgumentsCase

register_cpu_ci(est_time=30, suite="unit")


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
        """F comes from the drafter's config."""
        self.assertEqual(
            self.widths(), (server_args.DEFAULT_NUM_NODES, 8, server_args.DEFAULT_NUM_CANDIDATES)
        )

    def test_given(self):
        given = dict(
            speculative_num_draft_tokens=64, speculative_dflash_block_size=12, speculative_eagle_topk=4
        )
        self.assertEqual(self.widths(**given), (64, 12, 4))

    def write_head(self, architecture, **keys):
        config = DRAFTER | dict(architectures=[architecture], dflash_config=DRAFTER["dflash_config"] | keys)
        self.drafter = Path(tempfile.mkdtemp(dir=self.model.parent))  # upstream caches configurations by path
        (self.drafter / "config.json").write_text(json.dumps(config))
        (self.drafter / "model.safetensors").touch()

    def test_a_head_that_was_trained_with_a_number_of_candidates(self):
        self.write_head("DFlash2DraftModel", selector_rank=4, selector_top_k=12)
        self.assertEqual(self.widths()[2], 12)
        self.assertEqual(self.widths(speculative_eagle_topk=4)[2], 4)
        self.write_head("DFlash2DraftModel", selector_rank=4, selector_top_k=64)
        self.assertEqual(self.widths()[2], 32)

    def test_a_head_that_works_with_no_other_widths(self):
        sizes = dict(hidden_size=0, num_layers=1, num_heads=2, mlp_ratio=2, factor_dim=8, vector_eps=1e-6)
        keys = {
            f"lilicorr_{name}": value for name, value in dict(sizes, logit_scale=4, candidate_topk=4).items()
        }
        self.write_head("LiLiCorrDraftModel", **keys)
        self.assertEqual(self.widths()[2], 4)
        self.assertEqual(self.widths(speculative_dflash_block_size=6)[1], 6)
        for arguments, message in (
            (dict(speculative_eagle_topk=8), "--speculative-eagle-topk: expected 4 or no value, got 8"),
            (
                dict(speculative_dflash_block_size=9),
                "--speculative-dflash-block-size: expected at most 8, got 9",
            ),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.resolve(**arguments)

    def test_budget(self):
        """auto is the widest tree; a number is another way to give N."""
        self.assertEqual(self.widths(speculative_ddtree_budget="auto")[0], server_args.DEFAULT_AUTO_NODES)
        self.assertEqual(
            self.widths(speculative_ddtree_budget="auto", speculative_num_draft_tokens=20)[0], 20
        )
        self.assertEqual(self.widths(speculative_ddtree_budget="24")[0], 24)
        self.assertEqual(self.widths(speculative_ddtree_budget="24", speculative_num_draft_tokens=24)[0], 24)

    def test_budgets_that_are_refused(self):
        for arguments, message in (
            (dict(speculative_ddtree_budget="fast"), "expected 'auto' or a number of nodes, got 'fast'"),
            (dict(speculative_ddtree_budget="-4"), "expected 'auto' or a number of nodes, got '-4'"),
            (dict(speculative_ddtree_budget="0"), "--speculative-ddtree-budget: expected 2 to 256, got 0"),
            (dict(speculative_ddtree_budget="1"), "--speculative-ddtree-budget: expected 2 to 256, got 1"),
            (
                dict(speculative_ddtree_budget="16", speculative_num_draft_tokens=32),
                "--speculative-ddtree-budget: expected 'auto' or 32, as --speculative-num-draft-tokens, got 16",
            ),
            (
                dict(speculative_ddtree_budget="auto", speculative_ddtree_verify="validate"),
                "--speculative-ddtree-verify: expected 'native' with --speculative-ddtree-budget auto, got 'validate'",
            ),
            (
                dict(speculative_ddtree_trace="/no/such/folder/trace"),
                "--speculative-ddtree-trace: expected a file in a folder that exists, got '/no/such/folder/trace'",
            ),
            (
                dict(speculative_ddtree_trace="/"),
                "--speculative-ddtree-trace: expected a file, got the folder '/'",
            ),
            (
                dict(speculative_ddtree_trace="trace", dp_size=2),
                "--speculative-ddtree-trace: expected --dp-size 1, got 2",
            ),
        ):
            with self.subTest(arguments), self.assertRaisesRegex(ValueError, message):
                self.resolve(**arguments)

    def test_the_block_is_cut_to_the_tree(self):
        self.assertEqual(self.widths(speculative_num_draft_tokens=4)[:2], (4, 4))

    def test_one_candidate_makes_a_chain(self):
        self.assertEqual(self.widths(speculative_eagle_topk=1), (8, 8, 1))

    def test_the_tree_is_cut_to_the_nodes_that_the_candidates_give(self):
        self.assertEqual(
            self.widths(speculative_dflash_block_size=3, speculative_eagle_topk=2), (1 + 2 + 4, 3, 2)
        )

    def test_command_line(self):
        argv = ["--model-path", str(self.model), "--speculative-ddtree-verify", "validate",
                "--speculative-ddtree-top1-path", "keep"]  # fmt: skip
        args = prepare_server_args(argv)
        self.assertEqual(
            (args.speculative_ddtree_verify, args.speculative_ddtree_top1_path), ("validate", "keep")
        )

    def test_old_name_on_the_command_line(self):
        args = prepare_server_args(["--model-path", str(self.model), "--speculative-ddtree-spine", "keep"])
        self.assertEqual(args.speculative_ddtree_top1_path, "keep")


class TestRefusals(ArgumentsCase):
    def refused(self, text, **arguments):
        with self.assertRaisesRegex(ValueError, f"^DDTREE: {text}"):
            self.resolve(**arguments)

    def test_a_drafter_is_needed(self):
        self.refused("--speculative-draft-model-path", speculative_draft_model_path=None)

    def test_the_wheel_of_the_tree_ops_is_needed(self):
        with (
            patch.dict(sys.modules, {"sgl_kernel.ddtree": None}),
            self.assertRaisesRegex(ArgumentRefused, "sglang-kernel-ddtree.*pip install .* ./sgl-kernel"),
        ):
            self.resolve()

    def test_widths(self):
        self.refused(
            "--speculative-num-draft-tokens: expected 2 to 256, got 257", speculative_num_draft_tokens=257
        )
        self.refused(
            "--speculative-dflash-block-size: expected 2 to 33, got 34", speculative_dflash_block_size=34
        )
        self.refused("--speculative-eagle-topk: expected 1 to 32, got 33", speculative_eagle_topk=33)

    def test_zero_is_not_the_default(self):
        self.refused(
            "--speculative-num-draft-tokens: expected 2 to 256, got 0", speculative_num_draft_tokens=0
        )
        self.refused(
            "--speculative-dflash-block-size: expected 2 to 33, got 0", speculative_dflash_block_size=0
        )
        self.refused("--speculative-eagle-topk: expected 1 to 32, got 0", speculative_eagle_topk=0)
        self.refused("--speculative-num-steps: expected 1, got 0", speculative_num_steps=0)

    def test_page_size(self):
        for page_size in (0, -1):
            self.refused(f"--page-size: expected 1 or more tokens, got {page_size}", page_size=page_size)
        self.refused(
            "--page-size: expected a divisor of --chunked-prefill-size, which is 1024, got 3",
            page_size=3, chunked_prefill_size=1024,
        )  # fmt: skip
        self.resolve(page_size=3, chunked_prefill_size=1023)
        self.resolve(page_size=3, chunked_prefill_size=-1)

    def test_before_upstreams_own_checks(self):
        """Upstream would name an attention backend, and for another model path a file that is missing."""
        self.refused("--enable-deterministic-inference: expected False", enable_deterministic_inference=True)
        self.refused("--pp-size: expected 1, got 2", pp_size=2, model_path=str(self.model / "nothing"))

    def test_own_arguments_without_the_algorithm(self):
        plain = dict(speculative_algorithm=None, speculative_draft_model_path=None)
        self.refused(
            "--speculative-ddtree-verify 'triton': expected --speculative-algorithm DDTREE, got None",
            speculative_ddtree_verify="triton", **plain,
        )  # fmt: skip
        self.refused(
            "--speculative-ddtree-top1-path 'keep': expected --speculative-algorithm DDTREE, got 'NGRAM'",
            speculative_ddtree_top1_path="keep", **plain | dict(speculative_algorithm="NGRAM"),
        )  # fmt: skip
        self.resolve(**plain)

    def test_the_name_of_the_algorithm_in_small_letters(self):
        self.refused("--pp-size: expected 1, got 2", pp_size=2, speculative_algorithm="ddtree")

    def test_draft_attention_backend_on_cuda(self):
        """FlashAttention's reads the draft block as a tree if K is above 1."""
        resolved = resolved_view(self.resolve())

        class Cuda:
            device, attention_backend, speculative_draft_attention_backend = "cuda", "triton", "triton"

            def __getattr__(self, name):
                return getattr(resolved, name)

        server_args.refuse_server_args(Cuda())
        Cuda.speculative_draft_attention_backend = "fa3"
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: --speculative-draft-attention-backend: expected 'triton', got 'fa3'"
        ):
            server_args.refuse_server_args(Cuda())

    def test_verify_mode_without_triton(self):
        self.refused("--speculative-ddtree-verify: expected 'native'", speculative_ddtree_verify="validate")

    def test_grammars_that_cannot_step_back(self):
        """Rolling back an outlines grammar raises, which would stop the server at the first allowed token."""
        self.refused("--grammar-backend: expected .*, got 'outlines'", grammar_backend="outlines")
        self.resolve(grammar_backend="llguidance")

    def test_features(self):
        for flag, value in (
            ("pp_size", 2),
            ("attn_dp_size", 2),
            ("enable_dp_attention", True),
            ("disaggregation_decode_retraction_backup", "host_pool"),
            ("disaggregation_decode_enable_offload_kvcache", True),
            ("speculative_draft_sink_size", 4),
            ("enable_hierarchical_cache", True),
            ("hicache_storage_backend", "file"),
            ("enable_return_routed_experts", True),
            ("enable_return_indexer_topk", True),
            ("speculative_accept_threshold_acc", 0.9),
            ("speculative_use_rejection_sampling", True),
            ("speculative_token_map", "hot.pt"),
            ("speculative_adaptive", True),
            ("speculative_num_steps", 5),
            ("speculative_draft_attention_backend", "triton"),
        ):
            with self.subTest(flag):
                self.refused(f"--{flag.replace('_', '-')}: expected", **{flag: value})

    def test_disaggregation(self):
        """Upstream's default of a decoding server registers the host's memory with CUDA."""
        self.resolve(disaggregation_mode="prefill")
        resolved = resolved_view(self.resolve(disaggregation_mode="decode"))
        self.assertEqual(resolved.disaggregation_decode_retraction_backup, "cpu_tensor")

    def test_streaming_sessions_with_recurrent_layers(self):
        self.resolve(enable_streaming_session=True)
        with (
            patch.object(target, "mambaish_config", lambda config: config),
            patch.object(target, "kind_gaps", lambda config: []),
        ):
            self.refused("--enable-streaming-session: expected", enable_streaming_session=True)

    def test_a_draft_window_without_upstreams_warning(self):
        name = "sglang.srt.arg_groups.speculative_hook"
        with self.assertNoLogs(name, "WARNING"):
            self.resolve(speculative_draft_window_size=64)
        plain = dict(speculative_algorithm=None, speculative_draft_model_path=None)
        with self.assertLogs(name, "WARNING"):
            self.resolve(speculative_draft_window_size=64, **plain)

    def test_every_row_of_the_table_names_an_argument_and_serves_its_default(self):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        tables = (server_args.REFUSALS, *server_args.DEVICE_REFUSALS.values())
        for refusal in (refusal for table in tables for refusal in table):
            with self.subTest(refusal.field):
                flag = "--" + refusal.field.replace("_", "-")
                self.assertIn(flag, parser._option_string_actions)
                self.assertIn(getattr(ServerArgs(model_path="x"), refusal.field), refusal.served)
                wrong = SimpleNamespace(**{refusal.field: "something else"})
                with self.assertRaisesRegex(
                    ValueError, f"^DDTREE: {flag}: expected .*, got 'something else'"
                ):
                    refusal.check(wrong)

    def test_window_layers_keep_their_pool(self):
        self.assertFalse(resolved_view(self.resolve()).disable_hybrid_swa_memory)
        self.assertTrue(resolved_view(self.resolve(disable_hybrid_swa_memory=True)).disable_hybrid_swa_memory)

    def test_the_drafter_survives_a_release_of_memory(self):
        self.assertFalse(resolved_view(self.resolve()).enable_draft_weights_cpu_backup)
        saving = resolved_view(self.resolve(enable_memory_saver=True))
        self.assertTrue(saving.enable_draft_weights_cpu_backup)


class TestLoRA(ArgumentsCase):
    def test_it_is_served(self):
        self.resolve(lora_paths=["one=folder"]).check_server_args()

    def test_what_upstream_does_not_serve_with_dflash(self):
        args = self.resolve(lora_paths=["one=folder"])
        with (
            patch.dict(os.environ, {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}),
            self.assertRaisesRegex(ValueError, "does not support SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1"),
        ):
            args.check_server_args()

    def test_other_algorithms_are_upstreams_matter(self):
        for algorithm in ("FROZEN_KV_MTP", "DTREE"):
            with self.assertRaisesRegex(ValueError, f"not {algorithm}"):
                lora_hook.check_lora_speculative_compatibility(
                    SimpleNamespace(speculative_algorithm=algorithm)
                )


class TestVerifyMemory(ArgumentsCase):
    """What the default of --mem-fraction-static leaves for the verify, on a device of 80 GB."""

    capacity = 80 * 1024.0  # MB

    def fraction(self, **arguments):
        """The resolved fraction, and upstream's for the same arguments without DDTREE."""
        common = dict(device="cuda", attention_backend="triton", max_running_requests=48) | arguments
        with (
            patch("sglang.srt.utils.common.get_device_memory_capacity", lambda device=None: self.capacity),
            patch(
                "sglang.srt.arg_groups.memory_hook.get_device_memory_capacity",
                lambda device=None: self.capacity,
            ),
        ):
            own = resolved_view(self.resolve(**common)).mem_fraction_static
            widths = ("speculative_num_draft_tokens", "speculative_eagle_topk")
            plain = dict.fromkeys(("speculative_algorithm", "speculative_draft_model_path", *widths))
            return own, resolved_view(self.resolve(**common | plain)).mem_fraction_static

    def set_vocabulary(self, size):
        (self.model / "config.json").write_text(json.dumps(MODEL | dict(vocab_size=size)))

    def test_logits(self):
        self.set_vocabulary(152_000)
        for num_nodes in (32, 64):
            own, upstream = self.fraction(speculative_num_draft_tokens=num_nodes)
            logits = 48 * num_nodes * 152_000 * (4 + 2) / 2**20
            self.assertAlmostEqual(upstream - own, logits / self.capacity, delta=0.001)

    def test_activations_past_a_prefill_chunk(self):
        arguments = dict(speculative_num_draft_tokens=256, speculative_eagle_topk=32, max_running_requests=64)
        own, upstream = self.fraction(chunked_prefill_size=4096, **arguments)
        self.assertAlmostEqual(upstream - own, (64 * 256 - 4096) * 1.5 / self.capacity, delta=0.001)

    def test_a_named_fraction_stays(self):
        self.set_vocabulary(152_000)
        self.assertEqual(self.fraction(mem_fraction_static=0.8)[0], 0.8)

    def test_the_default_stays_where_the_pool_is_sized_after_capture(self):
        self.set_vocabulary(152_000)
        with patch.object(server_args, "post_capture_kv_sizing_planned", lambda args: True):
            own, upstream = self.fraction()
        self.assertEqual(own, upstream)

    def test_a_server_that_only_prefills_reserves_nothing(self):
        self.set_vocabulary(152_000)
        own, upstream = self.fraction(disaggregation_mode="prefill")
        self.assertEqual(own, upstream)

    def test_a_verify_that_leaves_no_room_is_refused(self):
        self.set_vocabulary(152_000)
        with self.assertRaisesRegex(ValueError, "^DDTREE: --max-running-requests x .* got 512 x 256"):
            self.fraction(
                max_running_requests=512, speculative_num_draft_tokens=256, speculative_eagle_topk=32
            )


class TestAttentionBackends(ArgumentsCase):
    """Which backend prefills, which verifies, and what is refused. CUDA is only named, not needed."""

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
        """Upstream's own rules for a backend, such as its page size, run before ours."""
        with override_platform(is_sm100=True, is_blackwell=True):
            self.check(self.resolve(attention_backend="trtllm_mha"), "trtllm_mha", page_size=64)
            self.check(self.resolve(prefill_attention_backend="trtllm_mha"), "trtllm_mha", page_size=64)
            self.check(self.resolve(attention_backend="trtllm_mla"), "trtllm_mla", page_size=64)
            self.check(self.resolve(attention_backend="fa4"), "fa4", page_size=128)
        with override_platform(is_sm120=True, is_blackwell=True):
            self.check(self.resolve(attention_backend="trtllm_mha", page_size=32), "trtllm_mha", page_size=32)

    def test_upstreams_choice_if_none_is_named(self):
        with override_platform(is_hopper_with_cuda_12_3=True):
            self.check(self.resolve(), "fa3")
            self.check(self.resolve(decode_attention_backend="triton"), "fa3")
        with override_platform(has_flashinfer=False):
            self.check(self.resolve(), "triton")

    def test_what_upstream_falls_back_to(self):
        self.check(self.resolve(attention_backend="fa3", kv_cache_dtype="fp8_e5m2"), "triton")

    def choose(self, device="cuda", chosen=None, **asked):
        """Run the rules alone. `chosen` is what upstream chose for this model or device."""
        raw = dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
        raw |= asked
        args = SimpleNamespace(**raw | (chosen or {}), device=device, _raw_input=raw)
        server_args.choose_attention_backends(args)
        return attention_backends_of(args)

    def test_what_upstream_chose_for_a_device_is_not_what_the_user_named(self):
        self.assertEqual(self.choose(chosen={"attention_backend": "trtllm_mha"}), ("trtllm_mha", "triton"))
        self.assertEqual(self.choose(chosen={"decode_attention_backend": "flashinfer"}), ("triton", "triton"))
        self.assertEqual(self.choose(chosen={"attention_backend": "aiter"}), ("triton", "triton"))
        self.assertEqual(
            self.choose(device="cpu", chosen={"attention_backend": "intel_amx"}),
            ("torch_native", "torch_native"),
        )

    def test_refused(self):
        for argument in ("attention_backend", "prefill_attention_backend"):
            for name, reason in (
                *((name, "it keeps more than K and V per token") for name in ("dsa", "nsa", "qsa", "dsv4")),
                *(
                    (name, "SGLang does not support it with speculative")
                    for name in ("flex_attention", "hpc_ops")
                ),
                ("cutedsl_mla", "it only decodes, and trtllm_mla prefills"),
                ("aiter", "it is for another device"),
            ):
                flag = argument.replace("_", "-")
                expected = (
                    f"^DDTREE: --{flag}: expected one of .*'trtllm_mha'.* on cuda, got '{name}': {reason}"
                )
                with self.subTest(argument, name=name), self.assertRaisesRegex(ValueError, expected):
                    self.choose(**{argument: name})

    def test_refused_although_upstream_replaces_it(self):
        """For a named backend that only decodes, upstream prefills with trtllm_mla."""
        with self.assertRaisesRegex(
            ValueError, "^DDTREE: --attention-backend: .* got 'cutedsl_mla': it only decodes"
        ):
            self.choose(attention_backend="cutedsl_mla", chosen={"prefill_attention_backend": "trtllm_mla"})

    def test_refused_if_the_model_supports_no_other(self):
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


if __name__ == "__main__":
    unittest.main()
