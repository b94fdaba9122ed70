"""DDTREE emits what plain decoding emits: the same tokens when greedy, the same distribution when sampling."""

import re
import tempfile
import unittest
from pathlib import Path

import torch
from ddtree_host import SYMBOLS, VOCABULARY, in_child, in_ranks, write_models
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=270, suite="e2e")

PROMPTS = [
    [3 + (7 * i + 5 * j * j) % 13 for j in range(length)] for i, length in enumerate((1, 5, 35, 65, 95, 17))
]
TOKENS = 48


def greedy(host, prompts=PROMPTS, tokens=TOKENS):
    return host.greedy(prompts, tokens)


def sample(host, prompt, count, options):
    """The first tokens of `count` answers to one prompt."""
    requests = host.generate([prompt] * count, max_new_tokens=3, ignore_eos=True, **options)
    return [list(request.output_ids)[:3] for request in requests]


class DDTreeCase(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.target, cls.drafter = write_models(Path(cls.folder.name))
        cls.plain = {"model_path": cls.target}
        cls.tree = cls.plain | {
            "speculative_algorithm": "DDTREE",
            "speculative_draft_model_path": cls.drafter,
        }

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()


class TestGreedy(DDTreeCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = in_child(cls.plain, greedy)[0]

    def check(self, least_accepted, **arguments):
        outputs, steps, accepted, (before, after) = in_child(self.tree | arguments, greedy)
        self.assertEqual(outputs, self.expected)
        self.assertEqual(before, after, "KV slots leaked")
        self.assertGreaterEqual(accepted, least_accepted)
        self.assertLess(steps, len(PROMPTS) * TOKENS)

    def test_tree(self):
        self.check(50, speculative_num_draft_tokens=32)

    def test_chain(self):
        """A tree of width 1 is DFLASH's chain."""
        self.check(5, speculative_num_draft_tokens=8, speculative_eagle_topk=1)

    def test_more_than_one_word_of_ancestors(self):
        self.check(100, speculative_num_draft_tokens=130, speculative_eagle_topk=12)

    def test_smallest_tree(self):
        self.check(5, speculative_num_draft_tokens=2)

    def test_keep_spine(self):
        self.check(30, speculative_num_draft_tokens=16, speculative_ddtree_spine="keep")

    def test_page_16(self):
        self.check(50, speculative_num_draft_tokens=32, page_size=16)

    def test_page_64(self):
        self.check(50, speculative_num_draft_tokens=32, page_size=64)

    def test_chunked_and_mixed_prefill(self):
        self.check(50, speculative_num_draft_tokens=32, chunked_prefill_size=16, enable_mixed_chunk=True)


def greedy_and_sampled(host):
    """greedy(), and tokens drawn after it."""
    return greedy(host), sample(
        host, PROMPTS[2], 8, {"temperature": 1.5, "top_p": 0.9, "frequency_penalty": 0.3}
    )


class TestTensorParallel(CustomTestCase):
    """Two ranks over gloo, each with half of a vocabulary that is large enough to be split (64 tokens a rank)."""

    def test_two_ranks(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        target, drafter = write_models(Path(folder.name), vocabulary=128)
        arguments = dict(
            model_path=target,
            speculative_algorithm="DDTREE",
            speculative_draft_model_path=drafter,
            speculative_num_draft_tokens=96,
            speculative_eagle_topk=32,
        )
        first, second = in_ranks(arguments | {"tp_size": 2}, greedy_and_sampled)
        self.assertEqual(first, second)
        alone = in_child(arguments, greedy)
        # The same tokens in the same steps: the ranks' trees are the one rank's.
        self.assertEqual(first[0], alone)
        self.assertGreater(alone[2], 30)
        self.assertEqual(alone[0], in_child({"model_path": target}, greedy)[0])


def again(host):
    """The same prompt twice, the second time with its first answer: the prefix comes from the radix cache."""
    prompt = PROMPTS[4]
    (first,) = host.generate([prompt], temperature=0, max_new_tokens=40, ignore_eos=True)
    answer = list(first.output_ids)[:40]
    (second,) = host.generate([prompt + answer[:30]], temperature=0, max_new_tokens=20, ignore_eos=True)
    return answer, list(second.output_ids)[:20], second.cached_tokens


def lengths(host):
    """Answers of 0 to 20 tokens, so that many end inside an accepted path."""
    requests = [
        host.submit(PROMPTS[2], temperature=0, max_new_tokens=tokens, ignore_eos=True) for tokens in range(21)
    ]
    return [list(request.output_ids_through_stop) for request in host.finish(requests)]


LONG = [PROMPTS[4] * 21, PROMPTS[3] * 31]  # 1995 and 2015 tokens of a context of 2048


def to_the_end(host):
    """Answers that only the context's end ends, and whether no slot leaked."""
    free = host.free_slots()
    requests = host.generate(LONG, temperature=0, max_new_tokens=4096, ignore_eos=True)
    return [list(request.output_ids_through_stop) for request in requests], host.free_slots() - free


def biased(host):
    bias = {"5": 2.0, "12": 1.0, "7": -3.0}
    requests = [
        host.submit(
            prompt,
            temperature=0,
            max_new_tokens=20,
            ignore_eos=True,
            **({"logit_bias": bias} if i % 2 else {}),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return [list(request.output_ids_through_stop) for request in host.finish(requests)]


def logprobs(host):
    """What is reported of each request: tokens, and all its log-probabilities as tensors by kind."""
    requests = host.generate(
        PROMPTS, temperature=0, max_new_tokens=19, ignore_eos=True,
        return_logprob=True, top_logprobs_num=3, token_ids_logprob=[4, 11], logprob_start_len=0,
    )  # fmt: skip
    kinds = ("token_logprobs_val", "top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val")

    def reported(request):
        output = list(request.output_ids_through_stop)
        values = {}
        for kind in kinds:
            values["input_" + kind] = [v for v in getattr(request.logprob, "input_" + kind) if v is not None]
            # The last path may go past the end; upstream's streamer leaves that out.
            values["output_" + kind] = getattr(request.logprob, "output_" + kind)[: len(output)]
        return output, values

    return [reported(request) for request in requests]


REGEX = r'\{"[ab]+":[01]+(,"[abc]+":\[[01]*\])*\}'


def constrained(host):
    """Text of each answer, every second one under a grammar."""
    requests = [
        host.submit(
            prompt, temperature=0, max_new_tokens=40, **({"regex": REGEX} if i % 2 else {"ignore_eos": True})
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return ["".join(SYMBOLS[t] for t in request.output_ids[:40]) for request in host.finish(requests)]


def impossible(host):
    """How requests end whose grammar no token can go on with after three, beside one that has none."""
    common = dict(max_new_tokens=20)
    requests = [
        host.submit(PROMPTS[1], temperature=0, regex="ab(0|1)x", **common),
        host.submit(PROMPTS[1], temperature=1.0, regex="ab(0|1)x", **common),
        host.submit(PROMPTS[2], temperature=1.5, top_p=0.9, ignore_eos=True, **common),
    ]
    host.finish(requests)
    return [
        (
            [
                "".join(SYMBOLS[t] for t in request.output_ids_through_stop),
                request.finished_reason.to_json()["type"],
            ]
        )
        for request in requests
    ]


def stopped(host):
    requests = host.generate(PROMPTS, temperature=0, max_new_tokens=48, stop_token_ids=[3, 9])
    return [list(request.output_ids_through_stop) for request in requests]


def stop_options(output):
    """Ways to end a request at or soon after each token of its greedy output, alone and against each other."""
    symbols = [SYMBOLS[token] for token in output]
    found = [dict(max_new_tokens=length) for length in range(1, 12)]
    for i in range(len(output) - 4):
        token, first, later = output[i], "".join(symbols[i : i + 2]), "".join(symbols[i + 2 : i + 4])
        found += [
            dict(stop=first + later),
            dict(stop=[later, first], no_stop_trim=True),
            dict(stop=[first + later], max_new_tokens=i + 3),
            dict(stop=first, min_new_tokens=i + 5),
            dict(stop_regex=[re.escape(later), re.escape(first) + "$"]),
            dict(stop_regex=re.escape(first) + ".", stop=later),
            dict(stop=symbols[i + 1] + later, stop_token_ids=[token]),
            dict(stop=symbols[i] + symbols[i + 1], stop_token_ids=[token], ignore_eos=True),
            dict(stop_token_ids=[token, output[i + 1]], max_new_tokens=i + 1),
            dict(stop_token_ids=[token], min_new_tokens=i + 3),
        ]
    return found


def stops(host):
    """Of each way to stop a greedy answer: the tokens through the stop, and the finish reason. And how many stopped
    before their last step's last token.
    """
    common = dict(temperature=0, max_new_tokens=24)
    (free,) = host.generate([PROMPTS[1]], ignore_eos=True, **common)
    ways = stop_options(free.output_ids[:24])
    requests = host.finish([host.submit(PROMPTS[1], **common | options) for options in ways])
    outputs = [list(request.output_ids_through_stop) for request in requests]
    reasons = [request.finished_reason.to_json() for request in requests]
    inside = sum(len(request.output_ids) > len(output) for request, output in zip(requests, outputs))
    return list(zip(ways, outputs, reasons)), inside


class _Windows:
    """greedy() of a model whose layers 0 and 2 see 16 tokens before a row, which it does not tell, as Laguna; and the window
    that the target's runner has for its attention backends.
    """

    def before(self):
        from sglang.srt.models import llama

        class Windowed(llama.RadixAttention):
            def __init__(self, *args, layer_id, **options):
                super().__init__(*args, layer_id=layer_id, **options)
                self.sliding_window_size = 16 if layer_id != 1 else -1

        llama.RadixAttention = Windowed

    def __call__(self, host):
        return *greedy(host), host.scheduler.tp_worker.model_runner.sliding_window_size


class TestFeatures(DDTreeCase):
    arguments = {"speculative_num_draft_tokens": 32}

    def both(self, job, *args):
        return in_child(self.plain, job, *args), in_child(self.tree | self.arguments, job, *args)

    def test_sliding_windows(self):
        plain, tree = self.both(_Windows())
        self.assertEqual(tree[0], plain[0])
        self.assertNotEqual(plain[0], in_child(self.plain, greedy)[0], "the windows change nothing")
        self.assertGreater(tree[2], 50)
        self.assertEqual((plain[-1], tree[-1]), (None, 16))

    def test_radix_cache_sees_compacted_kv(self):
        self.check_cache()

    def test_radix_cache_in_pages(self):
        self.check_cache(page_size=16)

    def check_cache(self, **arguments):
        answer, second, cached = in_child(self.tree | self.arguments | arguments, again)
        self.assertGreater(cached, len(PROMPTS[4]) + 10, "the answer's KV was not in the cache")
        self.assertEqual(in_child(self.plain, again)[0], answer)
        self.assertEqual(second[:10], answer[30:])

    def test_stop_tokens(self):
        plain, tree = self.both(stopped)
        self.assertEqual(tree, plain)

    def test_stops_inside_a_path(self):
        """Strings over several tokens, expressions, tokens and lengths: the first to come ends the answer."""
        arguments = {"skip_tokenizer_init": False}
        plain, _ = in_child(self.plain | arguments | {"disable_overlap_schedule": True}, stops)
        tree, inside = in_child(self.tree | self.arguments | arguments, stops)
        for expected, found in zip(plain, tree, strict=True):
            self.assertEqual(found, expected)
        self.assertGreater(inside, 20, "few answers stopped before their last step's last token")

    def test_grammar(self):
        """In one batch with requests that have none."""
        arguments = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
        plain = in_child(self.plain | arguments, constrained)
        self.assertEqual(in_child(self.tree | self.arguments | arguments, constrained), plain)
        for i, text in enumerate(plain):
            if i % 2 and text.endswith("</s>"):
                self.assertRegex(text.removesuffix("</s>"), f"^{REGEX}$")

    def test_grammar_that_allows_no_token(self):
        """It ends its request, and nothing else; sampling such a row would end the server."""
        arguments = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
        greedy, sampled, free = in_child(self.tree | self.arguments | arguments, impossible)
        for text, reason in (greedy, sampled):
            self.assertRegex(text, "^ab[01]$")
            self.assertEqual(reason, "abort")
        self.assertEqual(free[1], "length")

    def test_logprobs(self):
        """Of input and output, the token's own, the three largest and two asked for."""
        plain, tree = self.both(logprobs)
        for (tokens, values), (tree_tokens, tree_values) in zip(plain, tree):
            self.assertEqual(tree_tokens, tokens)
            for kind, expected in values.items():
                with self.subTest(kind):
                    # float32, two attention implementations
                    torch.testing.assert_close(
                        torch.tensor(tree_values[kind]), torch.tensor(expected), atol=1e-3, rtol=1e-3
                    )

    def test_an_answer_ends_inside_a_path(self):
        plain, tree = self.both(lengths)
        self.assertEqual(tree, plain)
        self.assertEqual([len(output) for output in tree[1:]], list(range(1, 21)))

    def test_context_ends(self):
        plain, tree = self.both(to_the_end)
        self.assertEqual(tree, plain)
        self.assertEqual(tree[1], 0, "KV slots leaked")

    def test_logit_bias(self):
        plain, tree = self.both(biased)
        self.assertEqual(tree, plain)


# Every request of a batch asks for something else; the last for nothing.
PENALTIES = (
    dict(frequency_penalty=0.4),
    dict(presence_penalty=0.8),
    dict(repetition_penalty=1.5),
    dict(min_new_tokens=30, stop_token_ids=[3, 9]),
    dict(),
    dict(frequency_penalty=-0.2, presence_penalty=0.5, repetition_penalty=0.7, min_new_tokens=12),
)


def penalize(logits, output, options):
    """One row of logits after `output`, by the definition in ddtree/penalties.py, a token at a time."""
    logits = logits.clone()
    for token in set(output):
        logits[token] -= options.get("frequency_penalty", 0.0) * output.count(token)
        logits[token] -= options.get("presence_penalty", 0.0)
        repetition = options.get("repetition_penalty", 1.0)
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    if len(output) < options.get("min_new_tokens", 0):
        logits[[1, *options.get("stop_token_ids", ())]] = -float("inf")
    return logits


def penalized(host):
    """Output tokens through a stop, accepted drafts, and how many requests were retracted on the way."""
    queue, retracted = host.scheduler._add_request_to_queue, []

    def watched(request, is_retracted=False, **options):
        retracted.extend([request.rid] * is_retracted)
        return queue(request, is_retracted=is_retracted, **options)

    host.scheduler._add_request_to_queue = watched
    requests = [
        host.submit(
            prompt,
            temperature=0,
            max_new_tokens=TOKENS,
            ignore_eos="min_new_tokens" not in options,
            **options,
        )
        for prompt, options in zip(PROMPTS, PENALTIES)
    ]
    host.finish(requests)
    return (
        [list(request.output_ids_through_stop) for request in requests],
        sum(request.spec_num_correct_drafts for request in requests),
        len(retracted),
    )


class TestPenalties(DDTreeCase):
    """Greedy, against the definition.

    Plain decoding follows it with overlap scheduling off and without retractions; else it counts a step late or forgets.
    Where a request combines repetition with the others, the order that upstream applies them in varies by process.
    """

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Upstream's penalizer of min_new_tokens asks the tokenizer for its stop tokens.
        cls.plain |= {"skip_tokenizer_init": False, "disable_overlap_schedule": True}
        cls.tree |= {"skip_tokenizer_init": False, "speculative_num_draft_tokens": 32}
        cls.expected = [cls.by_definition(*case) for case in zip(PROMPTS, PENALTIES)]

    @classmethod
    def by_definition(cls, prompt, options):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(cls.target, dtype=torch.float32)
        stops = [1, *options.get("stop_token_ids", ())] if "min_new_tokens" in options else []
        output = []
        while len(output) < TOKENS and not set(output[-1:]) & set(stops):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output])).logits[0, -1]
            output.append(int(penalize(logits, output, options).argmax()))
        return output

    def assert_by_definition(self, outputs):
        """Of the first requests, as many as there are outputs."""
        self.assertEqual(outputs, self.expected[: len(outputs)])

    def check(self, **arguments):
        outputs, accepted, retracted = in_child(self.tree | arguments, penalized)
        self.assert_by_definition(outputs)
        self.assertGreater(accepted, 30)
        return retracted

    def test_plain_decoding(self):
        self.assert_by_definition(in_child(self.plain, penalized)[0][:-1])

    def test_they_matter(self):
        without = [self.by_definition(prompt, {}) for prompt in PROMPTS]
        differ = [a != b[: len(a)] for a, b in zip(self.expected, without)]
        self.assertEqual(differ, [True, True, True, True, False, True])

    def test_tree(self):
        self.check()

    def test_mixed_prefill(self):
        self.check(chunked_prefill_size=16, enable_mixed_chunk=True)

    def test_retraction(self):
        self.assertGreater(self.check(speculative_num_draft_tokens=16, max_total_tokens=480), 0)


def filtered(probabilities, *, top_k=None, top_p=1.0, min_p=0.0):
    """A row of probabilities under the sampling options, as SGLang defines them."""
    ranked, index = probabilities.sort(descending=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        keep &= torch.arange(len(ranked)) < top_k
    ranked = ranked * keep
    ranked = ranked * ((ranked.cumsum(0) - ranked) <= top_p)
    ranked = ranked * (ranked >= ranked[0] * min_p)
    return torch.zeros_like(probabilities).scatter(0, index, ranked / ranked.sum())


class TestSampling(DDTreeCase):
    """Chi-square of the emitted triples against the exact distribution, from the target in transformers.

    1200 answers a case. Cells of fewer than 5 expected answers are pooled. The threshold is the quantile 1 - 1e-5, so a
    run of seven cases fails by chance once in 14,000. Power: an emitter that falls back to greedy in one step of ten
    would move the statistic past the threshold with probability above 0.99 (checked by test_power).
    """

    count = 1200
    prompt = PROMPTS[2]
    outside = 0.0  # share of the answers that may have probability 0

    def exact(self, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, **penalties):
        """Probability of each first triple of tokens, [V, V, V] float64."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float64)

        def next_token(prompts):
            with torch.no_grad():
                logits = model(torch.tensor(prompts)).logits[:, -1]
            for row, prompt in zip(logits, prompts):
                row.copy_(penalize(row, prompt[len(self.prompt) :], penalties))
            return torch.stack(
                [
                    filtered(row, top_k=top_k, top_p=top_p, min_p=min_p)
                    for row in (logits / temperature).softmax(-1)
                ]
            )

        first = next_token([self.prompt])[0]
        second = next_token([[*self.prompt, token] for token in range(VOCABULARY)])
        third = next_token([[*self.prompt, a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)])
        return (first[:, None] * second)[..., None] * third.view(VOCABULARY, VOCABULARY, -1)

    def statistic(self, answers, exact):
        """Chi-square over its threshold: above 1 is a rejection."""
        counts = torch.zeros_like(exact)
        for a, b, c in answers:
            counts[a, b, c] += 1
        self.assertLessEqual(
            float(counts[exact == 0].sum()),
            self.outside * len(answers),
            "tokens of probability 0 were emitted",
        )
        expected = exact * len(answers)
        large = expected >= 5
        pairs = torch.cat([torch.stack([counts[large], expected[large]], 1),
                           torch.stack([counts[~large].sum(), expected[~large].sum()])[None]])  # fmt: skip
        pairs = pairs[pairs[:, 1] > 0]
        chi = ((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1]).sum()
        freedom = len(pairs) - 1
        # Wilson and Hilferty: (chi / freedom) ** (1/3) is nearly normal; 4.265 is the normal's quantile 1 - 1e-5.
        spread = (2 / (9 * freedom)) ** 0.5
        return float(chi / (freedom * (1 - spread**2 + 4.265 * spread) ** 3))

    def check(self, **options):
        arguments = self.tree | {"speculative_num_draft_tokens": 24, "skip_tokenizer_init": False}
        answers = in_child(arguments, sample, self.prompt, self.count, options)
        self.assertLess(self.statistic(answers, self.exact(**options)), 1.0)

    def test_temperature_1(self):
        self.check(temperature=1.0)

    def test_temperature_2(self):
        self.check(temperature=2.0)

    def test_top_p(self):
        self.check(temperature=1.5, top_p=0.7)

    def test_top_k(self):
        self.check(temperature=1.5, top_k=5)

    def test_min_p(self):
        self.check(temperature=1.5, min_p=0.2)

    def test_all_options(self):
        self.check(temperature=1.7, top_k=9, top_p=0.9, min_p=0.1)

    def test_penalties(self):
        self.check(
            temperature=1.7,
            top_p=0.9,
            frequency_penalty=0.8,
            presence_penalty=-1.5,
            repetition_penalty=1.4,
            min_new_tokens=2,
        )

    def test_power(self):
        """The check rejects an emitter that is greedy in one answer of ten."""
        exact = self.exact(temperature=1.5)
        generator = torch.Generator().manual_seed(1)
        draws = torch.multinomial(exact.flatten(), self.count, replacement=True, generator=generator)
        fair = [divmod(int(d) // VOCABULARY, VOCABULARY) + (int(d) % VOCABULARY,) for d in draws]
        self.assertLess(self.statistic(fair, exact), 1.0)
        mode = int(exact.argmax())
        greedy_answer = divmod(mode // VOCABULARY, VOCABULARY) + (mode % VOCABULARY,)
        self.assertGreater(
            self.statistic(fair[: -self.count // 10] + [greedy_answer] * (self.count // 10), exact), 1.0
        )


if __name__ == "__main__":
    unittest.main()
