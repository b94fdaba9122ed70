"""DDTREE on a CUDA device: graphs and overlap scheduling on, in every verify mode, against plain decoding."""

import json
import sys
import tempfile
import time
import unittest
import warnings
from pathlib import Path

import torch
from sglang.test.ci.ci_register import register_cuda_ci

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
from ddtree_host import Child, write_fp8_target, write_gpt_oss_target, write_mla_target, write_models  # noqa: E402

register_cuda_ci(est_time=120, suite="gpu")

PROMPTS = [
    [3 + (7 * i + 5 * j * j) % 13 for j in range(length)]
    for i, length in enumerate((1, 5, 35, 65, 95, 17, 300))
]
TOKENS = 64
SECONDS = 300  # for all children together; one that hangs must not keep the others' results
TIE = 0.1  # logits; bfloat16's noise in them is of this size
ERROR = 1.0  # added to the output of one layer by a kernel that is wrong on purpose
# of every server here
CUDA = dict(
    device="cuda", dtype="bfloat16", attention_backend="triton", mem_fraction_static=0.8, max_total_tokens=16384,
    cuda_graph_max_bs_decode=8, cuda_graph_backend_prefill="disabled",
)  # fmt: skip


def greedy(host):
    """Output tokens, accepted drafts, slots free before and after, and what a validating verify found."""
    outputs, _, accepted, (free, _) = host.greedy(PROMPTS, TOKENS)
    host.generate(PROMPTS[:3], temperature=1.0, top_p=0.9, min_p=0.05, max_new_tokens=16, ignore_eos=True)
    found = None
    worker = host.scheduler.draft_worker
    if worker is not None and getattr(worker, "difference", None) is not None:
        worst = worker.difference.read()
        found = worst.value, worst.layer, worst.request
    return outputs, accepted, (free, host.free_slots()), found


def without_waiting(host):
    """greedy(), and where Python waited for the device between draft and commit: a list of file:line."""
    worker = host.scheduler.draft_worker
    decode = worker._decode
    steps, waits = 0, set()

    def watched(*args):
        nonlocal steps
        steps += 1
        if steps < 4:  # the first steps compile Triton kernels
            return decode(*args)
        torch.cuda.set_sync_debug_mode("warn")  # names the place and goes on, where "error" would end the run
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return decode(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits.update(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))

    worker._decode = watched
    result = greedy(host)
    assert steps > 10, steps
    return (*result, sorted(waits))


class _WrongKernel:
    """A job that runs greedy() on a host whose tree kernel errs in the last layer; installed before the host starts."""

    def __call__(self, host):
        return greedy(host)

    def before(self):
        from sglang.srt.layers.attention import ddtree_backend

        right = ddtree_backend.verify_gqa
        calls = 0

        def wrong(*args, **options):
            nonlocal calls
            calls += 1
            out = right(*args, **options)
            return out.add_(ERROR) if calls % 3 == 0 else out  # the target has three layers

        ddtree_backend.verify_gqa = wrong


class _WithoutExperts:
    """A job on a gpt-oss whose experts are one function without weights: not theirs are the kernels that are tested."""

    def __init__(self, job):
        self.job = job

    def __call__(self, host):
        return self.job(host)

    def before(self):
        from sglang.srt.models import gpt_oss

        class Function(torch.nn.Module):
            def __init__(self, **config):
                super().__init__()

            def forward(self, hidden_states, forward_batch=None):
                return torch.sin(hidden_states)

        gpt_oss.GptOssSparseMoeBlock = Function


class _Judge:
    """greedy() of plain decoding, which then judges the other children's answers: how far each token is from greedy.

    Identity would ask too much: in bfloat16 two tokens are often a rounding apart, and which wins depends on the shape of the
    batch. So each token is compared with the first choice after the same tokens, and plain decoding's own answers are too.
    """

    def __init__(self, answers: Path):
        self.answers = answers

    def __call__(self, host):
        result = greedy(host)
        deadline = time.monotonic() + SECONDS
        while not self.answers.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        answers = json.loads(self.answers.read_text()) | {"plain": result[0]}
        return (*result, {name: host.gaps(PROMPTS, outputs) for name, outputs in answers.items()})


def assert_first_choices(case, name, result, gaps, least_accepted, tie=TIE):
    """Every token is the first choice of a prefill over the same tokens, or ties with it; and no KV slot leaked.

    Args:
        case: the TestCase.
        name: of the server, in `gaps`.
        result: of greedy().
        gaps: by name, of each token of each answer; those of plain decoding's own answers as `plain`.
        least_accepted: drafts.
        tie: largest gap of a tie, in the logit; None: of an fp8 cache, which plain decoding's own answers measure.
    """
    _, accepted, (before, after) = result[:3]
    flat = {
        who: sorted((gap for answer in gaps[who] for gap in answer), reverse=True) for who in (name, "plain")
    }
    ties = sum(gap > 0 for gap in flat[name])
    print(f"{name}: {ties} of {len(flat[name])} tokens tie; largest gaps {flat[name][:4]}, "
          f"plain decoding's own {flat['plain'][:4]}; {accepted} accepted")  # fmt: skip
    case.assertLessEqual(flat[name][0], tie or 2 * flat["plain"][0])
    case.assertLess(ties, len(flat[name]) // 10)
    case.assertEqual(before, after, "KV slots leaked")
    case.assertGreaterEqual(accepted, least_accepted)


def models(case) -> tuple[Path, str, str]:
    """A folder for the models of a TestCase class, which goes when that ends; and in it write_models()' target and drafter."""
    temporary = tempfile.TemporaryDirectory()
    case.addClassCleanup(temporary.cleanup)
    folder = Path(temporary.name)
    return folder, *write_models(folder)


# not CustomTestCase, whose module wants packages that a bare CUDA host lacks
class TestDDTreeCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder, target, drafter = models(cls)
        plain = CUDA | dict(model_path=target)
        tree = plain | dict(speculative_algorithm="DDTREE", speculative_draft_model_path=drafter)
        rows_32 = tree | dict(speculative_num_draft_tokens=32)
        validate = rows_32 | dict(speculative_ddtree_verify="validate")
        rows_130 = tree | dict(speculative_num_draft_tokens=130, speculative_eagle_topk=12, page_size=16)
        mla = dict(model_path=write_mla_target(folder))
        fp8 = dict(kv_cache_dtype="fp8_e4m3")
        # An FP8 checkpoint's layers have scales: 1 unless it holds others, and read with an fp8 cache alone.
        unscaled = dict(model_path=write_fp8_target(target, folder / "unscaled"))
        scaled = dict(model_path=write_fp8_target(target, folder / "scaled", k_scale=0.5, v_scale=0.25)) | fp8
        sinks = dict(
            model_path=write_gpt_oss_target(folder),
            disable_hybrid_swa_memory=True,
            moe_runner_backend="triton",
        )
        # name: the plain decoding that judges it, its arguments, its job
        trees = {
            "native": ("plain", rows_32, without_waiting),
            "validate": ("plain", validate, greedy),
            "wrong": ("plain", validate, _WrongKernel()),
            "triton, page 64": (
                "plain",
                tree
                | dict(speculative_num_draft_tokens=70, page_size=64, speculative_ddtree_verify="triton"),
                greedy,
            ),
            "native, page 16, no overlap": ("plain", rows_130 | dict(disable_overlap_schedule=True), greedy),
            "chain": ("plain", tree | dict(speculative_eagle_topk=1), greedy),
            "no graph": ("plain", rows_32 | dict(disable_cuda_graph=True), greedy),
            "mla": ("mla plain", rows_32 | mla, greedy),
            "fp8": ("fp8 plain", rows_32 | fp8, greedy),
            "mixed prefill": (
                "plain",
                rows_32 | dict(chunked_prefill_size=64, enable_mixed_chunk=True),
                greedy,
            ),
            "unscaled": ("plain", rows_32 | unscaled, greedy),
            "scaled": ("scaled plain", rows_32 | scaled, greedy),
            "sinks": ("sinks plain", rows_32 | sinks, _WithoutExperts(greedy)),
        }
        plains = {
            "plain": plain, "mla plain": plain | mla, "fp8 plain": plain | fp8, "scaled plain": plain | scaled,
            "sinks plain": plain | sinks,
        }  # fmt: skip
        children = {name: Child(arguments, job) for name, (_, arguments, job) in trees.items()}
        judges = {
            name: Child(
                arguments,
                _WithoutExperts(_Judge(folder / name)) if "sinks" in name else _Judge(folder / name),
            )
            for name, arguments in plains.items()
        }
        deadline = time.monotonic() + SECONDS

        def collect(child):
            try:
                return child.result(max(1.0, deadline - time.monotonic()))
            except RuntimeError as error:
                return error

        cls.results = {name: collect(child) for name, child in children.items()}
        for judge in plains:
            answers = {
                name: cls.results[name][0]
                for name, (judged_by, _, _) in trees.items()
                if judged_by == judge and not isinstance(cls.results[name], RuntimeError)
            }
            (folder / "answers").write_text(json.dumps(answers))
            (folder / "answers").rename(folder / judge)
        cls.results |= {name: collect(child) for name, child in judges.items()}

    def result(self, name):
        result = self.results[name]
        if isinstance(result, RuntimeError):
            self.fail(f"{name}: {result}")
        return result

    def agree(self, name, least_accepted, plain="plain", tie=TIE):
        assert_first_choices(self, name, self.result(name), self.result(plain)[4], least_accepted, tie)

    def test_native_never_waits_between_draft_and_commit(self):
        self.agree("native", 50)
        self.assertEqual(self.result("native")[4], [])

    def test_triton(self):
        self.agree("triton, page 64", 50)

    def test_mla(self):
        self.agree("mla", 30, plain="mla plain")

    def test_fp8_kv(self):
        self.agree("fp8", 30, plain="fp8 plain", tie=None)

    def test_mixed_prefill(self):
        self.agree("mixed prefill", 50)

    def test_fp8_checkpoint(self):
        self.agree("unscaled", 50)

    def test_fp8_checkpoint_with_scales_and_fp8_kv(self):
        self.agree("scaled", 30, plain="scaled plain", tie=None)

    def test_sinks_and_sliding_windows(self):
        """As in prefill: the decode kernel of SGLang 0.5.23 on Triton sees one token less of a window than its prefill."""
        self.agree("sinks", 20, plain="sinks plain")

    def test_no_overlap(self):
        self.agree("native, page 16, no overlap", 50)

    def test_chain(self):
        self.agree("chain", 5)

    def test_no_graph(self):
        self.agree("no graph", 50)

    def test_validate(self):
        self.agree("validate", 50)
        value, _, _ = self.result("validate")[3]
        self.assertGreater(value, 0.0, "two kernels agree to the last bit: did both run?")
        self.assertLess(value, 0.05)  # bfloat16 outputs below 4 in size

    def test_a_wrong_kernel_is_reported_from_replays(self):
        """Graphs on: after capture no Python of ours runs in a layer, and still the error is found, and where."""
        self.agree("wrong", 50)  # the base backend's result is served
        value, layer, request = self.result("wrong")[3]
        self.assertAlmostEqual(value, ERROR, delta=0.1)
        self.assertEqual(layer, 2)
        self.assertRegex(request, "^r[0-9]+$")


if __name__ == "__main__":
    unittest.main(verbosity=2)
