"""A grammar that forbids every token leaves token 0, which it then refuses."""

import unittest

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

register_cpu_ci(est_time=20, suite="unit")

VOCABULARY = ["<s>", "</s>", "a", "b"]


def grammar(text):
    tokens = TokenizerInfo(VOCABULARY, vocab_size=len(VOCABULARY), stop_token_ids=[1])
    context = GrammarCompiler(tokens).compile_grammar(text)
    return XGrammarGrammar(GrammarMatcher(context), len(VOCABULARY), context, None)


class TestDeadEnd(CustomTestCase):
    def masked(self, *grammars):
        logits = torch.rand(len(grammars), len(VOCABULARY))
        before = logits.clone()
        mask = grammars[0].allocate_vocab_mask(len(VOCABULARY), len(grammars), "cpu")
        for row, one in enumerate(grammars):
            one.fill_vocab_mask(mask, row)
        GrammarMask(grammars[0], mask).apply(logits)
        return logits, before

    def test_token_0_is_left_and_refused(self):
        dead = grammar('root ::= root "a"')
        logits, _ = self.masked(dead)
        self.assertEqual(logits.softmax(-1).tolist(), [[1.0, 0.0, 0.0, 0.0]])
        with self.assertRaises(ValueError):
            dead.accept_token(0)

    def test_after_a_token(self):
        """The other branch of the grammar has an end."""
        dead = grammar('root ::= "a" | "b" x\nx ::= x "a"')
        dead.accept_token(VOCABULARY.index("b"))
        logits, _ = self.masked(dead)
        self.assertEqual(logits.softmax(-1)[0, 0], 1.0)

    def test_a_grammar_that_the_vocabulary_cannot_spell(self):
        logits, _ = self.masked(grammar('root ::= "c"'))
        self.assertEqual(logits.softmax(-1)[0, 0], 1.0)

    def test_other_rows_are_masked_as_before(self):
        logits, before = self.masked(grammar('root ::= root "a"'), grammar('root ::= "a" | "b"'))
        forbidden = -float("inf")
        self.assertEqual(logits[1].tolist(), [forbidden, forbidden, *before[1, 2:].tolist()])


if __name__ == "__main__":
    unittest.main()
