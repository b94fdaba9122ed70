"""What draft heads say of candidates, against upstream's own chains and against brute force."""

import itertools
import math
import unittest
from types import SimpleNamespace

import torch
from sgl_kernel.ddtree import DraftTrees
from sglang.srt.models.dflash import CandidateSelector
from sglang.srt.models.dflash_speculators import DraftHead
from sglang.srt.models.lilicorr import LiLiCorrHead as LiLiCorrModule
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ddtree.domino import DominoHead
from sglang.srt.speculative.ddtree.heads import HeadParts, LiLiCorrHead, MarginalHead, SelectorHead
from sglang.srt.speculative.ddtree.tree_builder import TreeBuilder
from sglang.srt.speculative.domino_utils import domino_greedy_rollout
from sglang.srt.speculative.lilicorr_utils import LiLiCorrConfig, lilicorr_candidates
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="unit")

BS, F, HIDDEN, VOCABULARY, RANK, GRU = 3, 6, 32, 12, 8, 10
D = F - 1


class HeadCase(CustomTestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.enterContext(torch.inference_mode())
        self.enterContext(get_parallel().override(tp_size=1))
        torch.compiler.set_stance("force_eager")
        self.addCleanup(torch.compiler.set_stance, "default")
        self.hidden = torch.randn(BS, F, HIDDEN)
        self.bonus = torch.randint(VOCABULARY, (BS,))
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.lm_head = SimpleNamespace(
            weight=torch.randn(VOCABULARY, HIDDEN) * 0.3, org_vocab_size=VOCABULARY, quant_method=None
        )

    def parts(self, drafter, num_candidates=VOCABULARY):
        config = SimpleNamespace(output_multiplier=1.0, final_logit_softcapping=None)
        return HeadParts(
            drafter=SimpleNamespace(draft_config=config, **drafter),
            lm_head=self.lm_head,
            embed=self.embed,
            num_candidates=num_candidates,
            max_requests=8,
        )

    def trees(self, head, num_nodes=24, keep_top1_path=False) -> DraftTrees:
        builder = TreeBuilder(
            head=head,
            block_size=F,
            num_nodes=num_nodes,
            keep_top1_path=keep_top1_path,
            max_bs=BS,
            device="cpu",
        )
        ids = torch.zeros(BS, F, dtype=torch.int64)
        ids[:, 0] = self.bonus
        builder(self.hidden.flatten(0, 1), ids.flatten())
        return builder.trees

    def paths(self, trees) -> list[set]:
        """For each request, the nodes as tuples of tokens."""
        every = []
        for r in range(BS):
            paths = {0: ()}
            for node in range(1, int(trees.sizes[r])):
                paths[node] = (*paths[int(trees.parents[r, node])], int(trees.tokens[r, node]))
            every.append(set(paths.values()))
        return every

    def chain(self, head) -> torch.Tensor:
        """[bs, D], the top-1 path of the head."""
        return self.trees(head, F, keep_top1_path=True).tokens[:, 1:]

    def selector(self, scale=1.0):
        selector = CandidateSelector(
            hidden_size=HIDDEN, vocab_size=VOCABULARY, state_rank=RANK, top_k=VOCABULARY
        )
        selector.predecessor_codebook.data.normal_()
        selector.successor_codebook.data.normal_().mul_(scale)
        return selector

    def domino(self, scale=1.0, shift_label=False):
        gru = torch.nn.GRU(HIDDEN, GRU, batch_first=True, bias=False)
        for weight in gru.parameters():
            weight.data.normal_().mul_(0.5)
        project = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN + GRU, RANK, bias=False),
            torch.nn.SiLU(),
            torch.nn.Linear(RANK, VOCABULARY, bias=False),
        )
        project[2].weight.data.normal_().mul_(scale)
        return dict(prefix_gru=gru, embed_proj=project, shift_label=shift_label)


class TestOwnHead(HeadCase):
    def test_it_proposes_its_tokens_and_no_others(self):
        """As the target's head does if all other tokens had a logit of -inf."""
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[[1, 4, 5, 9, 10]] = True
        own = DraftHead(5, HIDDEN)
        own.load(self.lm_head.weight[mask], mask)
        found = MarginalHead(self.parts(dict(draft_head=own), 4)).candidates(self.hidden, self.bonus)
        logits = (self.hidden[:, 1:] @ self.lm_head.weight.T).masked_fill(~mask, -math.inf)
        best = logits.log_softmax(-1).topk(4)
        self.assertTrue(torch.equal(found.tokens, best.indices))
        torch.testing.assert_close(found.log_probs - found.log_sum[..., None], best.values)

    def test_a_target_head_tied_to_a_plain_embedding(self):
        expected = MarginalHead(self.parts({}, 4)).candidates(self.hidden, self.bonus)
        self.lm_head = torch.nn.Embedding.from_pretrained(self.lm_head.weight)
        found = MarginalHead(self.parts({}, 4)).candidates(self.hidden, self.bonus)
        self.assertTrue(torch.equal(found.tokens, expected.tokens))


class TestSelector(HeadCase):
    def test_its_chain_is_upstreams(self):
        selector = self.selector()
        head = SelectorHead(self.parts(dict(candidate_selector=selector)))
        hidden = self.hidden[:, 1:]
        logits, ids = (hidden @ self.lm_head.weight.T).topk(VOCABULARY)
        scores = selector.build_lattice(
            candidate_ids=ids, unary_logits=logits, hidden_states=hidden, anchor_token_ids=self.bonus
        )
        chain, _ = selector.sample_path(
            candidate_ids=ids, scores=scores, uniforms=torch.zeros(BS, D), temperatures=torch.ones(BS),
            greedy_mask=torch.ones(BS, dtype=torch.bool),
        )  # fmt: skip
        self.assertTrue(torch.equal(self.chain(head), chain))
        self.assertFalse(torch.equal(self.chain(MarginalHead(self.parts({}))), chain))

    def test_a_correction_of_zero_gives_the_marginals_tree(self):
        for k in (4, VOCABULARY):
            marginal = MarginalHead(self.parts({}, k))
            head = SelectorHead(self.parts(dict(candidate_selector=self.selector(scale=0.0)), k))
            self.assertEqual(self.paths(self.trees(head)), self.paths(self.trees(marginal)))

    def test_probabilities_of_the_candidates_add_up_to_their_mass(self):
        head = SelectorHead(self.parts(dict(candidate_selector=self.selector()), 4))
        found = head.candidates(self.hidden, self.bonus).log_probs
        mass = (self.hidden[:, 1:] @ self.lm_head.weight.T).softmax(-1).topk(4).values.sum(-1)
        torch.testing.assert_close(found.exp().sum(-1), mass[..., None].expand(-1, -1, 4))

    def test_logits_are_transformed_first(self):
        parts = self.parts(dict(candidate_selector=self.selector(scale=0.0)), 4)
        parts.drafter.draft_config.output_multiplier = 0.5
        parts.drafter.draft_config.final_logit_softcapping = 2.0
        found = SelectorHead(parts).candidates(self.hidden, self.bonus).log_probs
        logits = torch.tanh(self.hidden[:, 1:] @ self.lm_head.weight.T * 0.5 / 2) * 2
        torch.testing.assert_close(found[:, :, 0], logits.log_softmax(-1).topk(4).values)


class TestDomino(HeadCase):
    def test_its_chain_is_upstreams(self):
        for shift_label in (False, True):
            drafter = self.domino(shift_label=shift_label)
            chain = domino_greedy_rollout(
                draft_hidden=self.hidden, bonus_tokens=self.bonus, target_embedding=self.embed,
                lm_head_weight=self.lm_head.weight, vocab_size=VOCABULARY, candidate_pool_size=0, in_cuda_graph=False,
                **drafter,
            )  # fmt: skip
            head = DominoHead(self.parts(drafter))
            self.assertTrue(torch.equal(self.chain(head), chain))
            self.assertFalse(torch.equal(self.chain(MarginalHead(self.parts({}))), chain))

    def test_a_correction_of_zero_gives_the_marginals_tree(self):
        for k in (4, VOCABULARY):
            marginal = MarginalHead(self.parts({}, k))
            head = DominoHead(self.parts(self.domino(scale=0.0), k))
            self.assertEqual(self.paths(self.trees(head)), self.paths(self.trees(marginal)))

    def test_a_beam_that_holds_every_path_gives_the_best_of_all(self):
        """Two candidates at five positions: the beam holds all 16 paths. Each path's score is computed alone."""
        k, num_nodes = 2, 12
        drafter = self.domino()
        gru, project = drafter["prefix_gru"], drafter["embed_proj"]
        got = self.paths(self.trees(DominoHead(self.parts(drafter, k)), num_nodes))
        logits = self.hidden[:, 1:] @ self.lm_head.weight.T
        tokens = logits.topk(k).indices
        mass = logits.log_softmax(-1).topk(k).values.logsumexp(-1)
        for r in range(BS):
            scores = {(): 0.0}
            for d in range(D):
                for path in itertools.product(*tokens[r, :d].tolist()):
                    own = logits[r, d, tokens[r, d]]
                    if d:
                        prefix = torch.tensor([[int(self.bonus[r]), *path]])
                        _, state = gru(self.embed(prefix))
                        both = torch.cat((self.hidden[r, d + 1], state[0, 0]))
                        own = own + project(both)[tokens[r, d]]
                    for token, value in zip(tokens[r, d].tolist(), own.log_softmax(-1) + mass[r, d]):
                        scores[*path, token] = scores[path] + float(value)
            best = sorted(scores, key=lambda path: -scores[path])[:num_nodes]
            self.assertEqual(got[r], set(best))

    def test_a_narrow_beam_scores_the_best_paths(self):
        """More paths than the beam holds: the log-probabilities of what it holds are those of these paths."""
        drafter = self.domino()
        found = DominoHead(self.parts(drafter, 8)).candidates(self.hidden, self.bonus)
        self.assertTrue((found.beam[:, 2:] >= 0).all())
        self.assertEqual([len(set(row.tolist())) for row in found.beam[:, 3]], [found.beam.shape[2]] * BS)
        scores = found.log_probs[:, 0, 0]
        for d in range(1, D):
            # The rows of a position are the best children of the rows above, in order.
            taken = scores.flatten(1).gather(1, found.beam[:, d].clamp(min=0).long())
            if d > 1:
                self.assertTrue((taken.diff(dim=1) <= 0).all())
                torch.testing.assert_close(taken, scores.flatten(1).topk(taken.shape[1]).values)
            scores = torch.where(
                found.beam[:, d, :, None] >= 0, taken[..., None] + found.log_probs[:, d], -math.inf
            )


class TestLiLiCorr(HeadCase):
    K = 4

    def module(self):
        config = LiLiCorrConfig(
            candidate_topk=self.K, hidden_size=16, num_layers=1, num_heads=2, mlp_ratio=2.0, factor_dim=8,
            vector_eps=1e-6, logit_scale=5.0,
        )  # fmt: skip
        module = LiLiCorrModule(model_hidden_size=HIDDEN, block_size=F, rms_norm_eps=1e-6, config=config)
        for name, weight in module.named_parameters():
            weight.data.fill_(1.0) if "norm.weight" in name else weight.data.normal_().mul_(0.3)
        return module

    def test_its_chain_is_upstreams(self):
        module = self.module()
        head = LiLiCorrHead(self.parts(dict(lilicorr=module), self.K))
        anchors = torch.randn(BS, HIDDEN)
        head.begin(torch.tensor([3, 1, 6]))
        head.set_anchor(anchors)
        hidden = self.hidden[:, 1:]
        log_probs, ids = lilicorr_candidates(
            hidden_states=hidden.flatten(0, 1), lm_head=self.lm_head, topk=self.K
        )
        ids = ids.view(BS, D, self.K)
        chain, _ = module.select_with_proposal(
            token_embeddings=self.embed(ids), candidate_tokens=ids, candidate_log_probs=log_probs.view(BS, D, self.K),
            pass_hidden=hidden, anchor_hidden=anchors, anchor_valid=torch.ones(BS, dtype=torch.bool),
            uniforms=torch.zeros(BS, D), temperatures=torch.ones(BS), greedy_mask=torch.ones(BS, dtype=torch.bool),
        )  # fmt: skip
        self.assertTrue(torch.equal(self.chain(head), chain))
        self.assertFalse(torch.equal(self.chain(MarginalHead(self.parts({}))), chain))

    def test_anchors_follow_their_requests(self):
        """The batch changes between the commit that gives the anchors and the draft that reads them."""
        head = LiLiCorrHead(self.parts(dict(lilicorr=self.module()), self.K))
        head.begin(torch.tensor([3, 1, 6]))
        head.set_anchor(torch.randn(BS, HIDDEN))
        want = head.candidates(self.hidden, self.bonus).log_probs
        order = torch.tensor([2, 0, 1])
        head.begin(torch.tensor([6, 3, 1]))
        found = head.candidates(self.hidden[order], self.bonus[order]).log_probs
        torch.testing.assert_close(found, want[order])
        head.set_anchor(torch.zeros(BS, HIDDEN))
        self.assertFalse(
            torch.allclose(head.candidates(self.hidden[order], self.bonus[order]).log_probs, found)
        )

    def test_a_request_from_another_server_gets_no_anchor_of_an_earlier_one(self):
        parts = self.parts(dict(lilicorr=self.module()), self.K)
        rows = torch.tensor([3, 1, 6])
        used, fresh = LiLiCorrHead(parts), LiLiCorrHead(parts)
        anchors = torch.randn(BS, HIDDEN)
        for head, known in ((used, BS), (fresh, 2)):
            head.begin(rows[:known])
            head.set_anchor(anchors[:known])
            head.begin(rows)
        want = fresh.candidates(self.hidden, self.bonus).log_probs
        self.assertFalse(torch.equal(used.candidates(self.hidden, self.bonus).log_probs, want))
        used.forget(rows[2:])
        self.assertTrue(torch.equal(used.candidates(self.hidden, self.bonus).log_probs, want))


if __name__ == "__main__":
    unittest.main()
