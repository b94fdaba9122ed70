"""Custom logit processors at the nodes of a tree: what each of them sees, also while the host is a step behind."""

import unittest
from array import array
from types import SimpleNamespace

import torch
from sgl_kernel.ddtree import DraftTrees, build_trees
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry
from sglang.srt.speculative.ddtree.logit_processors import LogitProcessors, process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="unit")

VOCABULARY = 11
NUM_NODES = 12


class Remember(CustomLogitProcessor):
    """Remembers what it saw, in the order of the calls: name, output and length of the request at each node."""

    def __init__(self):
        self.seen = []

    def __call__(self, logits, params):
        requests = [p["__req__"] for p in params]
        self.seen += [(r.rid, list(r.output_ids), r.origin_input_ids) for r in requests]
        return logits


class Broken(CustomLogitProcessor):
    def __init__(self, call):
        self.call = call

    def __call__(self, logits, params):
        return self.call(logits, params)


class Info(SimpleNamespace):
    """What DDTREE and upstream's sampler read of a SamplingBatchInfo."""

    def __len__(self):
        return len(self.custom_params)


def request(rid, output, **params):
    req = SimpleNamespace(
        rid=rid, origin_input_ids=array("q", [2] * 5), output_ids=array("q", output), to_finish=None
    )
    req.params = params | {"__req__": req}
    return req


def batch_of(reqs, processors, late=(), mode="decode"):
    """A batch whose request i has processors[i], or none. The host's output lacks `late` tokens of each request."""
    late = late or [0] * len(reqs)
    entries = [
        ProcessorEntry(processor, rows, torch.tensor(rows))
        for processor in dict.fromkeys(p for p in processors if p is not None)
        for rows in [[i for i, p in enumerate(processors) if p is processor]]
    ]
    lens = [len(r.origin_input_ids) + len(r.output_ids) + n for r, n in zip(reqs, late)]
    return SimpleNamespace(
        reqs=reqs,
        device="cpu",
        seq_lens=torch.tensor(lens) - int(mode == "decode"),  # the root's KV is not written
        sampling_info=Info(
            has_custom_logit_processor=bool(entries),
            custom_logit_processor=dict(enumerate(entries)),
            custom_params=[r.params if p is not None else None for r, p in zip(reqs, processors)],
        ),
    )


class TestNodes(CustomTestCase):
    def setUp(self):
        self.generator = torch.Generator().manual_seed(3)
        self.processors = LogitProcessors()

    def trees(self, roots):
        bs = len(roots)
        order = torch.rand(bs, 4, VOCABULARY, generator=self.generator).argsort(-1)
        scores = torch.rand(bs, 4, 3, generator=self.generator).sort(-1, descending=True).values.log()
        trees = DraftTrees.allocate(bs, NUM_NODES, "cpu")
        return build_trees(order[..., :3].contiguous(), scores, torch.tensor(roots), trees)

    def logits(self, batch):
        return torch.randn(len(batch.reqs) * NUM_NODES, VOCABULARY, generator=self.generator)

    def run_step(self, batch, roots):
        """Run a step; return its trees, its logits before, and after."""
        trees = self.trees(roots)
        before = self.logits(batch)
        after = before.clone()
        process(after, batch, self.processors.states(batch, lambda: trees))
        return trees, before, after

    def paths(self, trees, row):
        """The tokens on the path to each node, without the root's."""
        paths = [[]]
        for parent, token in zip(trees.parents[row].tolist()[1:], trees.tokens[row].tolist()[1:]):
            paths.append([*paths[parent], token] if parent >= 0 else [])
        return paths

    def test_each_node_has_the_output_of_its_path(self):
        reqs, remember = [request("a", [4]), request("b", [7, 8, 9]), request("c", [1, 1])], Remember()
        trees, _, _ = self.run_step(batch_of(reqs, [remember, None, remember]), [4, 9, 1])
        expected = [
            (reqs[i].rid, [*reqs[i].output_ids, *path], reqs[i].origin_input_ids)
            for i in (0, 2)
            for path in self.paths(trees, i)
        ]
        self.assertEqual(remember.seen, expected)
        self.assertGreater(max(len(output) for _, output, _ in expected), 4)
        self.assertEqual([list(r.output_ids) for r in reqs], [[4], [7, 8, 9], [1, 1]])

    def check_late(self, batch, lates):
        """Check the roots of a step that begins before the host has the tokens `lates` of each request."""
        remember = Remember()
        batch = batch_of(batch.reqs, [remember] * len(batch.reqs), [len(late) for late in lates])
        self.run_step(batch, [late[-1] for late in lates])
        seen = [output for _, output, _ in remember.seen[::NUM_NODES]]
        self.assertEqual(seen, [[*r.output_ids, *late] for r, late in zip(batch.reqs, lates)])

    def test_tokens_that_the_host_does_not_have_yet(self):
        """As with overlap scheduling: after a prefill, and after a step, also in another order and company."""
        a, b = request("a", []), request("b", [6])
        prefill = batch_of([a, b], [Remember()] * 2, mode="prefill")
        self.processors.remember(prefill, torch.tensor([[4], [5]]))
        self.check_late(prefill, [[4], [5]])
        a.output_ids.append(4)
        b.output_ids.append(5)
        step = batch_of([a, b], [Remember()] * 2, [3, 1])
        self.processors.remember(step, torch.tensor([[7, 8, 9], [3, 0, 0]]), torch.tensor([3, 1]))
        self.check_late(batch_of([b, a], [Remember()] * 2), [[3], [7, 8, 9]])

    def test_a_mixed_prefill_in_upstreams_sampler(self):
        """Running requests have their last tokens, different parameters do not meet, and one that fails ends alone."""
        remember, disallowed = Remember(), DisallowedTokensLogitsProcessor()
        broken = Broken(lambda logits, params: 1 / 0)
        reqs = [
            request("a", [4]),
            request("b", []),
            request("c", [], token_ids=[1]),
            request("d", [], token_ids=[2]),
        ]
        reqs.append(request("e", []))
        self.processors.remember(batch_of(reqs[:1], [remember]), torch.tensor([[7, 8, 0]]), torch.tensor([2]))
        processors = [remember, remember, disallowed, disallowed, broken]
        batch = batch_of(reqs, processors, [2, 0, 0, 0, 0], mode="mixed")
        self.processors.prefill(batch)
        before = torch.randn(5, VOCABULARY, generator=self.generator)
        after = before.clone()
        apply_custom_logit_processor(after, batch.sampling_info)
        self.assertEqual([output for _, output, _ in remember.seen], [[4, 7, 8], []])
        expected = before.clone()
        expected[2, 1] = expected[3, 2] = -float("inf")
        torch.testing.assert_close(after, expected)
        self.assertIn("ZeroDivisionError", reqs[4].to_finish.message)
        self.assertEqual([req.to_finish for req in reqs[:4]], [None] * 4)

    def test_nothing_is_copied_without_processors(self):
        batch = batch_of([request("a", [4])], [None])
        self.assertIsNone(self.processors.states(batch, lambda: self.fail("the trees are not needed")))

    def test_requests_with_different_parameters(self):
        """Upstream's own processor refuses these in one call."""
        processor = DisallowedTokensLogitsProcessor()
        reqs = [request("a", [4], token_ids=[1, 2]), request("b", [5]), request("c", [6], token_ids=[3])]
        _, before, after = self.run_step(batch_of(reqs, [processor, None, processor]), [4, 5, 6])
        expected = before.view(3, NUM_NODES, -1).clone()
        expected[0, :, [1, 2]] = expected[2, :, 3] = -float("inf")
        torch.testing.assert_close(after.view_as(expected), expected)

    def test_new_logits_are_taken(self):
        doubled = Broken(lambda logits, params: logits.double() * 2)
        _, before, after = self.run_step(batch_of([request("a", [4])], [doubled]), [4])
        torch.testing.assert_close(after, before * 2)

    def test_one_that_fails_ends_its_request(self):
        def set_request(logits, params):
            params[0]["__req__"].calls = 1

        def set_params(logits, params):
            params[0]["calls"] = 1

        for text, call in (
            ("cannot write to its request", set_request),
            ("cannot write to its request", set_params),
            ("cannot write to its request", lambda logits, params: params[0].update(calls=1)),
            ("ZeroDivisionError", lambda logits, params: 1 / 0),
            (f"expected logits of shape ({NUM_NODES}, {VOCABULARY}), got (1, {VOCABULARY})",
             lambda logits, params: logits[:1]),
        ):  # fmt: skip
            with self.subTest(text):
                reqs = [request("a", [4]), request("b", [5])]
                fine = Broken(lambda logits, params: logits + 1)
                _, before, after = self.run_step(batch_of(reqs, [Broken(call), fine]), [4, 5])
                self.assertIn(text, reqs[0].to_finish.message)
                self.assertEqual(reqs[0].to_finish.status_code, 400)
                self.assertIsNone(reqs[1].to_finish)
                torch.testing.assert_close(after[NUM_NODES:], before[NUM_NODES:] + 1)

    def test_logits_that_cannot_be_sampled(self):
        """The sampler gets no NaN, no infinity, and at least one token per node, also from a processor that fails."""

        def fill_and_raise(logits, params):
            logits.fill_(-float("inf"))
            raise ValueError("too late")

        for text, call in (
            ("forbids every token", lambda logits, params: logits.fill_(-float("inf"))),
            ("is NaN", lambda logits, params: logits * float("nan")),
            ("fails afterwards", fill_and_raise),
        ):
            with self.subTest(text):
                _, _, after = self.run_step(batch_of([request("a", [4])], [Broken(call)]), [4])
                probabilities = torch.softmax(after / 0.01, -1)
                torch.testing.assert_close(probabilities[:, 0], torch.ones(NUM_NODES))
        with self.subTest("forces a token"):
            force = Broken(lambda logits, params: logits.index_fill(1, torch.tensor([3]), float("inf")))
            _, before, after = self.run_step(batch_of([request("a", [4])], [force]), [4])
            probabilities = torch.softmax(after / 0.01, -1)
            torch.testing.assert_close(probabilities[:, 3], torch.ones(NUM_NODES))
            torch.testing.assert_close(after[:, :3], before[:, :3])


if __name__ == "__main__":
    unittest.main()
