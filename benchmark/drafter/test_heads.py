"""Heads that know the path, and their trees, against brute force."""

import itertools
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from sglang.test.ci.ci_register import register_cpu_ci

from benchmark.drafter import prompts, train, train_heads
from benchmark.drafter.evaluate import Marginals, accepted, top1, visits
from benchmark.drafter.heads import Domino, Lattice, Selector, load, save, token_features
from benchmark.drafter.model import Drafter, DrafterConfig
from benchmark.drafter.nodes import OFF, ON, Calibrated, Counts

register_cpu_ci(est_time=30, suite="unit")

VOCAB, HIDDEN, DEPTH, K = 23, 8, 3, 4
STEPS = 120
RECIPE = train_heads.HeadRecipe(drafts=64, candidates=K, choose=7)


def lattice(n: int, k: int = K) -> Lattice:
    """Random drafts. The target's token is a candidate most of the time, and the first one often."""
    logits = torch.randn(n, DEPTH, VOCAB) * 2
    top = logits.topk(k)
    truth = torch.where(torch.rand(n, DEPTH) < 0.7, top.indices[..., 0], top.indices[..., -1])
    truth[torch.rand(n, DEPTH) < 0.1] = 0
    rest = logits.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
    return Lattice(
        torch.randint(VOCAB, (n,)), top.indices, top.values, rest, torch.randn(n, DEPTH, HIDDEN), truth
    )


def random_heads() -> list[Selector | Domino]:
    """Both heads with weights that matter."""
    embed = torch.randn(VOCAB, HIDDEN)
    heads = [Selector(VOCAB, HIDDEN, 5), Domino(embed, 6, 5)]
    for head in heads:
        for weight in head.parameters():
            torch.nn.init.normal_(weight)
    return heads


@torch.no_grad()
def prefix_scores(head, drafts: Lattice) -> dict[tuple[int, ...], torch.Tensor]:
    """The score [n] of every prefix, each walked on its own."""
    scores, n = {}, len(drafts)
    for length in range(1, DEPTH + 1):
        for prefix in itertools.product(range(K), repeat=length):
            walk, score = head.walk(drafts), torch.zeros(n)
            state = walk.start()
            for d, choice in enumerate(prefix):
                score = score + walk.log_q(d, state)[:, 0, choice]
                column = torch.full((n, 1), choice)
                state = walk.follow(d, state, torch.zeros_like(column), column)
            scores[prefix] = score
    return scores


class TestTrees(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @torch.no_grad()
    def test_the_tree_holds_the_best_prefixes(self):
        drafts = lattice(50)
        for head in random_heads():
            scores = prefix_scores(head, drafts)
            prefixes, table = list(scores), torch.stack(list(scores.values()), 1)
            budgets = (1, 5, 12)
            actual = accepted(head.walk(drafts), drafts.ids, drafts.truth, budgets)
            for budget, row in zip(budgets, actual.tolist(), strict=True):
                for i, best in enumerate(table.topk(budget).indices.tolist()):
                    tree = {
                        tuple(drafts.ids[i, d, c].item() for d, c in enumerate(prefixes[j])) for j in best
                    }
                    truth = tuple(drafts.truth[i].tolist())
                    expected = max(d for d in range(DEPTH + 1) if d == 0 or truth[:d] in tree)
                    self.assertEqual(row[i], expected)
            self.assertGreater(len(set(row)), 2)

    @torch.no_grad()
    def test_an_untrained_head_is_the_plain_drafter(self):
        drafts = lattice(20)
        for head in (Selector(VOCAB, HIDDEN, 5), Domino(torch.randn(VOCAB, HIDDEN), 6, 5)):
            plain = accepted(Marginals(drafts.marginals()), drafts.ids, drafts.truth, (0, 3, 9))
            self.assertEqual(
                accepted(head.walk(drafts), drafts.ids, drafts.truth, (0, 3, 9)).tolist(), plain.tolist()
            )

    @torch.no_grad()
    def test_training_scores_are_the_trees(self):
        drafts = lattice(30)
        inside = drafts.match.any(-1).all(-1)
        self.assertGreater(int(inside.sum()), 5)
        for head in random_heads():
            choices = drafts.match.long().argmax(-1)
            forced = head.teacher_forced(drafts).log_softmax(-1) + drafts.mass[..., None]
            expected = forced.gather(-1, choices[..., None])[..., 0].sum(1)
            scores = prefix_scores(head, drafts)
            for i in inside.nonzero()[:, 0].tolist():
                torch.testing.assert_close(
                    scores[tuple(choices[i].tolist())][i], expected[i], rtol=1e-4, atol=1e-4
                )


class TestLattice(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def test_fewer_candidates_keep_the_probabilities(self):
        drafts = lattice(10, 9)
        torch.testing.assert_close(drafts.best(4).marginals(), drafts.marginals()[..., :4])
        torch.testing.assert_close(drafts.mass.exp(), drafts.marginals().exp().sum(-1))

    def test_visits(self):
        self.assertEqual(visits([2, 1, 0, 1, 5]), [0, 3])
        self.assertEqual(visits([]), [])


class TestLoss(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def test_depth_1_costs_what_differs_from_the_plain_drafter(self):
        drafts = lattice(30)
        drafts.truth[:, 1:] = -1  # nothing else is left
        drafts.truth[:, 0] = drafts.ids[:, 0, 1]
        plain = drafts.logits[:, 0].softmax(-1)
        heads = (*random_heads(), Selector(VOCAB, HIDDEN, 5))
        for head in heads:
            log_q = head.teacher_forced(drafts)[:, 0].log_softmax(-1)
            expected = torch.nn.functional.kl_div(log_q, plain, reduction="batchmean")
            loss, weight = train_heads.slot_loss(head, drafts, decay=4.0)
            torch.testing.assert_close(loss / weight, expected)
            # Domino and an untrained selector leave depth 1 alone.
            self.assertEqual(float(loss) > 1e-3, head is heads[0])

    def test_a_deeper_position_weighs_less_and_one_without_a_path_nothing(self):
        drafts = lattice(4)
        drafts.truth = drafts.ids[..., 2].clone()
        drafts.truth[0, 1] = -1
        head = random_heads()[0]
        log_q = head.teacher_forced(drafts).log_softmax(-1)[..., 2]
        corrected = head.teacher_forced(drafts)[:, 0].log_softmax(-1)
        plain = drafts.logits[:, 0].log_softmax(-1)
        first = (plain.exp() * (plain - corrected)).sum(-1)
        inside = torch.tensor([[1, 0, 0], *[[1, 1, 1]] * 3])
        by_depth = torch.tensor([1.0, torch.e**-0.5, torch.e**-1.0]) * inside
        loss, weight = train_heads.slot_loss(head, drafts, decay=2.0)
        torch.testing.assert_close(weight, by_depth.sum())
        torch.testing.assert_close(
            loss, (by_depth[:, 0] * first).sum() - (by_depth[:, 1:] * log_q[:, 1:]).sum()
        )


class TestMeasures(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @torch.no_grad()
    def test_tree_length_is_the_mean_of_all_drafts(self):
        drafts = lattice(50)
        for head in random_heads():
            steps = accepted(head.walk(drafts), drafts.ids, drafts.truth, [7])[0]
            found = train_heads.tree_length(head.walk, drafts, 8, rows=16)
            self.assertAlmostEqual(found, 1 + float(steps.double().mean()), places=3)

    @torch.no_grad()
    def test_first_choices_after_the_targets_prefix(self):
        drafts = lattice(60)
        for head in (None, *random_heads()):
            logits = drafts.logits if head is None else head.teacher_forced(drafts)
            right, count = [0] * DEPTH, [0] * DEPTH
            for i in range(len(drafts)):
                for d in range(DEPTH):
                    count[d] += 1
                    right[d] += bool(drafts.ids[i, d, logits[i, d].argmax()] == drafts.truth[i, d])
                    if drafts.truth[i, d] not in drafts.ids[i, d]:
                        break  # no tree goes on from here
            expected = [round(r / c, 4) for r, c in zip(right, count, strict=True)]
            self.assertEqual(train_heads.first_choice(head, drafts, rows=16), expected)

    def test_texts_that_answer_our_templates(self):
        class Words:
            """Each character is a token."""

            def encode(self, text, add_special_tokens):
                return SimpleNamespace(ids=list(map(ord, text)))

        def text(turn):
            ids = list(map(ord, train.BEFORE + turn + train.AFTER))
            return [*ids, 1, 2, 3], len(ids)

        ours, other = text(prompts.written()[7]), text("What is a tree?")
        self.assertEqual(train_heads.split_templates([other, ours], Words()), ([ours], [other]))


class TestTraining(unittest.TestCase):
    def test_both_heads_learn_what_follows_a_token(self):
        """The target's token is a function of the token before, which the drafter does not know."""
        torch.manual_seed(0)
        drafts = lattice(2000)
        drafts.hidden = (
            1 + 0.1 * drafts.hidden
        )  # the selector multiplies by it, so its sign must not be random
        follows = torch.randperm(VOCAB)
        for d in range(1, DEPTH):  # the follower is always the last candidate
            other = drafts.ids[:, d] == follows[drafts.prefix[:, d]][:, None]
            drafts.ids[:, d] = torch.where(other, 0, drafts.ids[:, d])
            drafts.ids[:, d, -1] = follows[drafts.prefix[:, d]]
            drafts.truth[:, d] = drafts.ids[:, d, -1]
        train, test = drafts[:1500], drafts[1500:]
        plain = accepted(Marginals(test.marginals()), test.ids, test.truth, (0, 6)).double().mean(1)
        embed = torch.randn(VOCAB, HIDDEN)
        for make in (
            lambda free: Selector(VOCAB, HIDDEN, 8, tokens=token_features(embed), free=free),
            lambda free: Domino(embed, 8, 8, tokens=token_features(embed), free=free),
        ):
            settings = ((1e-4, 1.0), (1e-1, 1.0))
            head, best, stats = train_heads.best_fit(make, train, test, RECIPE, settings, STEPS)
            self.assertEqual(best, settings[1])
            self.assertLess(stats[1]["loss"][-1][2], stats[0]["loss"][-1][2])
            with torch.no_grad():
                lengths = accepted(head.walk(test), test.ids, test.truth, (0, 6)).double().mean(1)
            self.assertTrue((lengths > 1.3 * plain).all(), (lengths, plain))


class TestFiles(unittest.TestCase):
    def test_a_checkpoint_is_the_head_and_a_link_to_the_drafter(self):
        torch.manual_seed(0)
        config = DrafterConfig(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1)
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            Drafter(config).save(root / "drafter")
            for i, head in enumerate(random_heads()):
                save(head, K, root / "drafter", root / f"head{i}")
                again = load(root / f"head{i}", getattr(head, "embed", torch.zeros(VOCAB, HIDDEN)))
                for key, value in head.tensors().items():
                    torch.testing.assert_close(again.tensors()[key], value)
                found = [set(load_file(path)) for path in (root / f"head{i}").glob("*.safetensors")]
                self.assertEqual(set.union(*found), set(head.tensors()) | set(Drafter(config).state_dict()))
                self.assertEqual(sum(map(len, found)), len(set.union(*found)))

    def test_the_demos_heads(self):
        demo = Path(__file__).parents[2] / "demo"
        drafter = set(load_file(demo / "SmolLM2-135M-DFlash" / "model.safetensors"))
        for name, kind, size in (("selector", Selector, 6_500_000), ("domino", Domino, 8_000_000)):
            folder = demo / f"SmolLM2-135M-DFlash-{name}"
            self.assertLessEqual((folder / "head.safetensors").stat().st_size, size)
            head = load(folder, torch.ones(49152, 576))
            self.assertIsInstance(head, kind)
            self.assertTrue(all(torch.isfinite(w).all() for w in head.tensors().values()))
            self.assertEqual(set(load_file(folder / "drafter.safetensors")), drafter)


class TestNodes(unittest.TestCase):
    @torch.no_grad()
    def test_counts_against_enumeration(self):
        torch.manual_seed(0)
        drafts, budget = lattice(40), 9
        for head in random_heads():
            scores = prefix_scores(head, drafts)
            prefixes, table = list(scores), torch.stack(list(scores.values()), 1)
            expected = {field: torch.zeros(2, DEPTH, K, dtype=torch.float64) for field in Counts.FIELDS}
            for i, best in enumerate(table.topk(budget).indices.tolist()):
                for prefix in (prefixes[j] for j in best):
                    d = len(prefix) - 1
                    place = [self.rank(scores, prefix[: e + 1], i) for e in range(d + 1)]
                    side = ON if not any(place[:-1]) else OFF
                    right = [drafts.ids[i, e, c] == drafts.truth[i, e] for e, c in enumerate(prefix)]
                    parent = scores[prefix[:-1]][i] if d else 0.0
                    at = side, d, place[-1]
                    expected["built"][at] += 1
                    expected["reached"][at] += all(right[:-1])
                    expected["accepted"][at] += all(right)
                    expected["expected"][at] += all(right[:-1]) * float((scores[prefix][i] - parent).exp())
            counts = Counts(DEPTH, K, "cpu")
            counts.add(head.walk(drafts), drafts.ids, drafts.truth, budget)
            for field, value in expected.items():
                torch.testing.assert_close(getattr(counts, field), value, rtol=1e-5, atol=1e-5)
                self.assertGreater(float(value[OFF].sum()), 0)

    @staticmethod
    def rank(scores, prefix, i: int) -> int:
        return sum(bool(scores[(*prefix[:-1], c)][i] > scores[prefix][i]) for c in range(K))

    @torch.no_grad()
    def test_a_correction_moves_the_expectation_to_what_was_observed(self):
        torch.manual_seed(0)
        drafts = lattice(400)
        for head in random_heads():
            counts = Counts(DEPTH, K, "cpu")
            counts.add(head.walk(drafts), drafts.ids, drafts.truth, None)
            correction = counts.correction(prior=1e-6)
            walk = Calibrated(head.walk(drafts), correction)
            again = Counts(DEPTH, K, "cpu")
            again.add(walk, drafts.ids, drafts.truth, None)
            # The corrected order may differ, but not the sums per depth and side of what was expected.
            kept = again.reached.sum(-1) > 0
            torch.testing.assert_close(
                again.expected.sum(-1)[:, 0][kept[:, 0]],
                counts.accepted.sum(-1)[:, 0][kept[:, 0]],
                rtol=1e-3,
                atol=1e-3,
            )

    @torch.no_grad()
    def test_a_correction_changes_which_path_is_first(self):
        torch.manual_seed(0)
        drafts = lattice(5)
        correction = torch.zeros(2, DEPTH, K)
        correction[ON, 1, 1] = 50.0  # under the root's first choice, the second choice wins
        plain = Marginals(drafts.marginals())
        choices = top1(Calibrated(plain, correction), DEPTH)
        self.assertEqual(choices[:, :2].tolist(), [[0, 1]] * 5)
        correction[OFF, 2, 2] = 50.0  # the second choice left the top-1 path
        self.assertEqual(top1(Calibrated(plain, correction), DEPTH).tolist(), [[0, 1, 2]] * 5)


if __name__ == "__main__":
    unittest.main()
