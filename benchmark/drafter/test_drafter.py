"""The drafter's training code against independent references."""

import heapq
import itertools
import json
import random
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.test.ci.ci_register import register_cpu_ci
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.drafter import prompts, train_heads
from benchmark.drafter.evaluate import Marginals, accepted, replay
from benchmark.drafter.model import Drafter, DrafterConfig
from benchmark.drafter.target import Target
from benchmark.drafter.train import HeadLoss, blocks, cut_loop

register_cpu_ci(est_time=20, suite="unit")

HERE = Path(__file__).parent
SHAPE = dict(hidden_size=48, vocab_size=61, max_position_embeddings=128, head_dim=16)
DRAFTER = DrafterConfig(
    **SHAPE,
    num_target_layers=4,
    num_hidden_layers=2,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    block_size=4,
    mask_token_id=3,
    target_layer_ids=(0, 2),
)


def tiny_target(folder: str):
    """A random Llama, in transformers' implementation and in ours."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPE, num_hidden_layers=4, intermediate_size=48, num_attention_heads=6, num_key_value_heads=2,
        tie_word_embeddings=True, eos_token_id=2, bos_token_id=1, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    return theirs, Target(Path(folder), "cpu", torch.float32)


class TestTarget(unittest.TestCase):
    def test_hidden_states_and_logits_are_those_of_transformers(self):
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = tiny_target(folder)
        ids = torch.randint(0, 61, (2, 9))
        with torch.no_grad():
            expected = theirs(ids, output_hidden_states=True)
        hidden, features = ours.forward(ids, layer_ids=(0, 2))
        torch.testing.assert_close(ours.logits(hidden), expected.logits, rtol=1e-4, atol=1e-4)
        taken = torch.cat((expected.hidden_states[1], expected.hidden_states[3]), -1)
        torch.testing.assert_close(features, taken, rtol=1e-4, atol=1e-4)

    def test_greedy_answers_are_those_of_transformers(self):
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = tiny_target(folder)
        asked = [torch.randint(3, 61, (n,)).tolist() for n in (1, 4, 7, 3, 5, 6)]
        free = [
            theirs.generate(torch.tensor([a]), max_new_tokens=40, do_sample=False)[0].tolist() for a in asked
        ]
        eos = free[0][len(asked[0]) + 9]  # a token that the target emits
        theirs.generation_config.eos_token_id = eos
        ours.config = replace(ours.config, eos_token_id=eos)
        answers = ours.generate(asked, 40, compact_every=4)
        self.assertGreater(len({len(a) for a in answers}), 1, "no answer ended early and left the batch")
        for ask, answer in zip(asked, answers, strict=True):
            whole = theirs.generate(torch.tensor([ask]), max_new_tokens=40, do_sample=False)[0].tolist()
            self.assertEqual(ask + answer, whole)


class TestTraining(unittest.TestCase):
    def test_head_loss_is_cross_entropy(self):
        torch.manual_seed(0)
        hidden, head = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5)
        labels, weights = torch.randint(0, 11, (7,)), torch.rand(7)
        expected = (
            torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none") * weights
        ).sum()
        (gradient,) = torch.autograd.grad(expected, hidden)
        loss = HeadLoss.apply(hidden, head, labels, weights, 3)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], gradient)

    def test_blocks_of_a_batch_see_what_a_server_has(self):
        """Each block equals a pass of its own: it sees the context before its bonus token and no other block."""
        with tempfile.TemporaryDirectory() as folder:
            _, target = tiny_target(folder)
        torch.manual_seed(0)
        drafter = Drafter(DRAFTER)
        ids, lengths = torch.randint(4, 61, (2, 16)), torch.tensor([16, 11])
        anchors = torch.tensor([[3, 9, 14], [2, 7, 9]])
        features = target.forward(ids, layer_ids=DRAFTER.target_layer_ids)[1]
        with torch.no_grad():
            hidden, labels = blocks(drafter, target, ids, features, anchors, lengths)
            for row, i in itertools.product(range(2), range(3)):
                a = int(anchors[row, i])
                inputs = torch.tensor([[int(ids[row, a]), 3, 3, 3]])
                context = target.forward(ids[row : row + 1, :a], layer_ids=DRAFTER.target_layer_ids)[1]
                alone = drafter(
                    target.embed[inputs], context, torch.arange(a, a + 4)[None], torch.arange(a), None
                )
                torch.testing.assert_close(hidden[row, i], alone[0, 1:], rtol=1e-4, atol=1e-4)
                truth = [int(ids[row, a + d]) if a + d < lengths[row] else -1 for d in (1, 2, 3)]
                self.assertEqual(labels[row, i].tolist(), truth)

    def test_drafts_are_the_drafters_best_candidates(self):
        with tempfile.TemporaryDirectory() as folder:
            _, target = tiny_target(folder)
        torch.manual_seed(0)
        drafter, texts = Drafter(DRAFTER), [(torch.randint(4, 61, (n,)).tolist(), 3) for n in (16, 11)]
        anchors = torch.tensor([[3, 9, 14], [3, 7, 9]])
        with torch.no_grad():
            drafter.norm.weight[:] = 3.0  # some positions are so sure that nothing is left for other tokens
            drafts = train_heads.drafts(drafter, target, texts, anchors, 5)
            ids = torch.tensor([ids + [0] * (64 - len(ids)) for ids, _ in texts])
            features = target.forward(ids, layer_ids=DRAFTER.target_layer_ids)[1]
            hidden, truth = blocks(drafter, target, ids, features, anchors, torch.tensor([16, 11]))
        best = target.logits(hidden.flatten(0, 1)).log_softmax(-1).topk(5)
        self.assertGreater(float(best.values.exp().sum(-1).max()), 1 - 1e-6)
        part = drafts[:]
        self.assertEqual(part.ids.tolist(), best.indices.tolist())
        torch.testing.assert_close(part.marginals(), best.values, rtol=1e-4, atol=1e-4)
        self.assertEqual(part.truth.tolist(), truth.flatten(0, 1).tolist())
        self.assertEqual(part.anchors.tolist(), ids.gather(1, anchors).flatten().tolist())

    def test_cut_loop(self):
        self.assertEqual(cut_loop([9, 8] + [1, 2, 3] * 20), [9, 8] + [1, 2, 3] * 3)
        self.assertEqual(cut_loop(list(range(50))), list(range(50)))


class TestAcceptedLength(unittest.TestCase):
    def test_against_a_heap(self):
        torch.manual_seed(0)
        n, depth, vocab = 40, 4, 12
        log_q, ids = (torch.randn(n, depth, vocab) * 2).log_softmax(-1).sort(-1, descending=True)
        truth = ids.gather(2, torch.randint(0, 3, (n, depth, 1)))[..., 0]
        for budget in (1, 5, 12):
            actual = accepted(Marginals(log_q[..., :budget]), ids[..., :budget], truth, [budget])[0].tolist()
            self.assertEqual(actual, [self.best_first(log_q[i], ids[i], truth[i], budget) for i in range(n)])
        self.assertGreater(len(set(actual)), 2)

    @staticmethod
    def best_first(log_q, ids, truth, budget: int) -> int:
        """Grow the tree prefix by prefix, then walk it."""
        heap, tree = [(-float(q), (int(t),)) for q, t in zip(log_q[0], ids[0], strict=True)], set()
        heapq.heapify(heap)
        while len(tree) < budget:
            score, prefix = heapq.heappop(heap)
            tree.add(prefix)
            if len(prefix) < len(log_q):
                for q, t in zip(log_q[len(prefix)], ids[len(prefix)], strict=True):
                    heapq.heappush(heap, (score - float(q), (*prefix, int(t))))
        return max(d for d in range(len(truth) + 1) if d == 0 or tuple(truth[:d].tolist()) in tree)

    def test_chain_and_replay(self):
        ids = torch.tensor([[[5], [6], [7]], [[5], [6], [7]], [[1], [6], [7]], [[5], [6], [7]]])
        truth = torch.tensor([[5, 6, 9], [5, 9, 7], [5, 6, 7], [5, -1, -1]])
        steps = accepted(Marginals(torch.zeros(4, 3, 1)), ids, truth, [0])[0]
        self.assertEqual(steps.tolist(), [2, 1, 0, 1])
        self.assertEqual(replay(steps), (4, 2))  # the first step emits three tokens, the second the last one


class TestPrompts(unittest.TestCase):
    def test_the_chat_questions_are_not_among_the_templates(self):
        questions = [
            json.loads(line)["prompt"] for line in (HERE / "eval_chat.jsonl").read_text().splitlines()
        ]
        self.assertGreaterEqual(len(set(questions)), 80)
        self.assertEqual(set(questions) & set(prompts.written()), set())

    def test_contamination(self):
        known = prompts.Contamination([list(range(20)), [1, 2, 3]], n=5)
        self.assertIn([90, 91, *range(7, 12), 92], known)
        self.assertIn([1, 2, 3], known)
        self.assertNotIn([90, *range(7, 11), 92], known)
        self.assertNotIn([1, 2, 3, 4], known)

    def test_openers_are_reproducible(self):
        self.assertEqual(prompts.openers(20, random.Random(3)), prompts.openers(20, random.Random(3)))


class TestCommittedWeights(unittest.TestCase):
    def test_they_fit_the_budget_and_load(self):
        folder = HERE.parents[1] / "demo" / "SmolLM2-135M-DFlash"
        self.assertLessEqual((folder / "model.safetensors").stat().st_size, 20_000_000)
        drafter = Drafter.load(folder)
        self.assertEqual(set(load_file(folder / "model.safetensors")), set(drafter.state_dict()))
        self.assertTrue(all(torch.isfinite(w).all() for w in drafter.parameters()))


if __name__ == "__main__":
    unittest.main()
