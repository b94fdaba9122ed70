"""Upstream's classes compute the same from saved drafters and heads as our own models."""

import tempfile
import unittest
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.layer_ut_utils import init_single_process_dist
from sglang.test.test_utils import CustomTestCase

from benchmark.drafter.evaluate import top1
from benchmark.drafter.heads import Domino, Lattice, Selector, save
from benchmark.drafter.model import Drafter, DrafterConfig

register_cpu_ci(est_time=35, suite="unit")

SMALL = DrafterConfig(
    hidden_size=64,
    vocab_size=97,
    num_target_layers=6,
    max_position_embeddings=128,
    num_hidden_layers=2,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    block_size=5,
    mask_token_id=3,
    target_layer_ids=(1, 3, 4),
)


class DenseAttention(torch.nn.Module):
    """Replaces RadixAttention. The block attends to the context and to itself, in both directions."""

    def __init__(self, radix, context_k, context_v):
        super().__init__()
        self.radix, self.k, self.v = radix, context_k, context_v

    def forward(self, q, k, v, forward_batch):
        heads = lambda x, n: x.view(x.shape[0], n, -1).transpose(0, 1)[None]  # noqa: E731
        k = heads(torch.cat((self.k, k)), self.radix.tp_k_head_num)
        v = heads(torch.cat((self.v, v)), self.radix.tp_v_head_num)
        q = heads(q, self.radix.tp_q_head_num)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.radix.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class TestUpstreamReadsOurDrafter(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        init_single_process_dist()

    @classmethod
    def tearDownClass(cls):
        destroy_model_parallel()
        destroy_distributed_environment()

    def test_same_logits(self):
        from sglang.srt.models.dflash import DFlashDraftModel
        from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

        torch.manual_seed(1)
        ours = Drafter(SMALL)
        for weight in ours.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)  # no norm weight is one
        with tempfile.TemporaryDirectory() as folder:
            ours.save(Path(folder), torch.float32)
            again = Drafter.load(Path(folder))
            config = get_config(folder, trust_remote_code=False)
        parsed = parse_dflash_draft_config(draft_hf_config=config)
        self.assertEqual(parsed.block_size, SMALL.block_size)
        self.assertEqual(parsed.mask_token_id, SMALL.mask_token_id)
        self.assertEqual(tuple(parsed.target_layer_ids), SMALL.target_layer_ids)

        theirs = DFlashDraftModel(config)
        before = {name: w.clone() for name, w in theirs.named_parameters()}
        theirs.load_weights(again.state_dict().items())
        self.assertEqual([n for n, w in theirs.named_parameters() if torch.equal(w, before[n])], [])

        context, block = 9, SMALL.block_size
        features = torch.randn(context, 3 * SMALL.hidden_size)
        embeds = torch.randn(block, SMALL.hidden_size)
        at_context, at_block = torch.arange(context), torch.arange(context, context + block)
        with torch.no_grad():
            expected = ours(embeds[None], features[None], at_block[None], at_context, None)[0]
            hidden = theirs.project_target_hidden(features)
            for layer in theirs.layers:
                attention = layer.self_attn
                k, v = attention.kv_proj_only(theirs.prepare_context_hidden_for_kv(layer, hidden))
                k = attention.apply_k_rope(at_context, attention.apply_k_norm(k))
                attention.attn = DenseAttention(attention.attn, k, v)
            actual = theirs(
                torch.zeros(block, dtype=torch.int64), at_block, None, input_embeds=embeds
            ).hidden_states
        head = torch.randn(SMALL.vocab_size, SMALL.hidden_size)
        # Both sides are float32 with sums of at most 192 terms. The differences observed are near 1e-6.
        torch.testing.assert_close(actual @ head.T, expected @ head.T, rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_heads(self):
        """The chains of upstream's selector and Domino, with all tokens as candidates, are our top-1 paths."""
        from sglang.srt.models.dflash import DFlash2DraftModel, DFlashDraftModel
        from sglang.srt.speculative.domino_utils import domino_greedy_rollout

        torch.manual_seed(2)
        n, depth, vocab_size = 6, SMALL.block_size - 1, SMALL.vocab_size
        embedding, lm_head = torch.nn.Embedding(vocab_size, SMALL.hidden_size), torch.nn.Linear(1, 1)
        lm_head.weight = torch.nn.Parameter(torch.randn(vocab_size, SMALL.hidden_size) * 0.2)
        hidden, anchors = torch.randn(n, SMALL.block_size, SMALL.hidden_size), torch.randint(vocab_size, (n,))
        top = (hidden[:, 1:] @ lm_head.weight.T).topk(vocab_size)
        none = torch.full((n, depth), -1e9)
        lattice = Lattice(anchors, top.indices, top.values, none, hidden[:, 1:], top.indices[..., 0])
        heads = [Selector(vocab_size, SMALL.hidden_size, 8), Domino(embedding.weight, 12, 8)]
        for head, model_class in zip(heads, (DFlash2DraftModel, DFlashDraftModel), strict=True):
            for weight in head.parameters():
                torch.nn.init.normal_(weight)
            head.load(head.tensors(), "cpu")
            with tempfile.TemporaryDirectory() as name:
                Drafter(SMALL).save(Path(name) / "drafter")
                save(head, vocab_size, Path(name) / "drafter", Path(name) / "head")
                theirs = model_class(get_config(str(Path(name) / "head"), trust_remote_code=False))
                before = {key: w.clone() for key, w in theirs.named_parameters()}
                files = [load_file(path) for path in sorted((Path(name) / "head").glob("*.safetensors"))]
                theirs.load_weights((key, w) for file in files for key, w in file.items())
            ones = {
                key for key in before if "norm" in key
            }  # a new drafter's gains are one, as upstream's are
            same = {key for key, w in theirs.named_parameters() if torch.equal(w, before[key])}
            self.assertEqual(same, ones)
            path = lattice.ids.gather(2, top1(head.walk(lattice), depth)[..., None])[..., 0]
            if isinstance(head, Selector):
                selector, count = theirs.candidate_selector.float(), torch.ones(n)
                with torch.compiler.set_stance("force_eager"):
                    scores = selector.build_lattice(
                        candidate_ids=lattice.ids,
                        unary_logits=lattice.logits,
                        hidden_states=lattice.hidden,
                        anchor_token_ids=anchors,
                    )
                    expected, _ = selector.sample_path(
                        candidate_ids=lattice.ids,
                        scores=scores,
                        uniforms=torch.zeros(n, depth),
                        temperatures=count,
                        greedy_mask=count.bool(),
                    )
            else:
                expected = domino_greedy_rollout(
                    draft_hidden=hidden,
                    bonus_tokens=anchors,
                    target_embedding=embedding,
                    lm_head_weight=lm_head.weight,
                    prefix_gru=theirs.prefix_gru.float(),
                    embed_proj=theirs.embed_proj.float(),
                    vocab_size=vocab_size,
                    shift_label=theirs.shift_label,
                    candidate_pool_size=0,
                    in_cuda_graph=False,
                )
            self.assertEqual(path.tolist(), expected.tolist())
            plain = lattice.ids[..., 0]
            self.assertGreater(int((path != plain).sum()), n, "the head changes the path")


if __name__ == "__main__":
    unittest.main()
