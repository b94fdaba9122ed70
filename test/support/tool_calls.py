"""Requests with tools for a tiny DeepSeek-V4. A grammar makes its random weights write valid calls."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from support.deepseek_v4 import VOCABULARY, Job

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Tool

    from support.engine import Engine

PARSER = "deepseekv4"  # the server's --tool-call-parser
TOOL_SETS = 8
EOS = "<eos>"
PIECES = r"</?｜DSML｜\w+(?: name=\")?|\" string=\"|\">|[^\W\d]+|."  # of a text, in this order
CITIES = ("Bergen", "Lima", "Nairobi", "Oslo", "Porto", "Quito", "Riga", "Seoul")
WORDS = (
    "about",
    "after",
    "before",
    "call",
    "date",
    "each",
    "given",
    "returns",
    "table",
    "the",
    "under",
    "with",
)


class Answer(NamedTuple):
    """What an engine answered to one request: tokens, and their text without special ones."""

    tokens: list[int]
    text: str


# A call of DeepSeek-V4 without its values, then the whitespace that may be anywhere in it.
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="">\n'
    '<｜DSML｜parameter name="" string="true">[, ]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\t\r'
)


def _tool(name: str, rng: random.Random, **parameters: Any) -> dict[str, Any]:
    description = " ".join(rng.choices(WORDS, k=400))
    schema = dict(type="object", properties=parameters, required=list(parameters), additionalProperties=False)
    return dict(
        type="function",
        function=dict(name=name, description=description, strict=True, parameters=schema),
    )


def tools(tool_set: int) -> list[Tool]:
    """The tools of one set. Their descriptions are so long that an indexer selects some of a prompt's tokens."""
    from sglang.srt.entrypoints.openai.protocol import Tool

    rng = random.Random(tool_set)
    number = lambda most: dict(type="integer", minimum=1, maximum=most)  # noqa: E731
    city = dict(type="string", enum=rng.sample(CITIES, 5))
    found = [
        _tool("get_weather", rng, city=city, days=number(14), metric=dict(type="boolean")),
        _tool("book_table", rng, guests=number(99), at=city),
        _tool("add", rng, values=dict(type="array", items=number(999), minItems=1, maxItems=4)),
    ]
    return [Tool(**tool) for tool in found]


def parser(tool_set: int) -> Any:
    """SGLang's parser of calls to the tools of a set."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser(tools(tool_set), PARSER)


def _system_prompt(tool_set: int) -> str:
    return json.dumps([tool.model_dump(exclude_none=True) for tool in tools(tool_set)])


def _grammar(tool_set: int) -> str:
    """What SGLang constrains an answer by if its request has `tool_choice="required"`."""
    _, tag = parser(tool_set).get_structure_constraint("required", parallel_tool_calls=False)
    for tool in tag.format.elements[1].tags:
        tool.content.max_whitespace_cnt = 1  # random weights may repeat whitespace for ever
    return tag.model_dump_json()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are words, single characters and the tags of a call.

    With bytes in its vocabulary, random weights would spell most of a call letter by letter.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    # With "=" a call can go on after a single quote and the word "string", too.
    texts = [CALL, "=", string.digits, *(_system_prompt(i) for i in range(TOOL_SETS))]
    found = {piece for text in texts for piece, _ in pieces.pre_tokenize_str(text)}
    special = [
        "<bos>",
        EOS,
        "<unknown>",
    ]  # the first two have the numbers that the model's configuration says
    vocabulary = [*special, *sorted(found)]
    assert len(vocabulary) <= VOCABULARY, f"expected at most {VOCABULARY} tokens, got {len(vocabulary)}"
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, "<unknown>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<bos>", eos_token=EOS, unk_token="<unknown>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class ToolCalls(Job):
    """Greedy answers to requests of which each must call one tool. The job returns an Answer to each.

    The grammars are compiled beforehand, in a thread of SGLang. After that, what runs together does not depend on
    time: two engines with the same arguments form the same batches.

    Args:
        requests: how many. Request `i` has the tools of set `i % TOOL_SETS`.
        concurrency: how many are answered at once.
        options: the options of Job.
    """

    def __init__(self, requests: int, concurrency: int, **options: Any) -> None:
        super().__init__(**options)
        self.requests, self.concurrency = requests, concurrency

    def answer(self, engine: Engine) -> list[Answer]:
        tokenizer = engine.scheduler.tokenizer
        systems = [tokenizer.encode(_system_prompt(i)) for i in range(TOOL_SETS)]
        tags = [_grammar(i) for i in range(TOOL_SETS)]

        def submit(i: int, tokens: int) -> Any:
            question = " ".join(random.Random(i).choices(WORDS, k=60))
            prompt = systems[i % TOOL_SETS] + tokenizer.encode(f"\n\n{i}: {question}")
            return engine.submit(
                prompt, temperature=0, max_new_tokens=tokens, structural_tag=tags[i % TOOL_SETS]
            )

        engine.finish([submit(i, 1) for i in range(TOOL_SETS)])
        requests: list[Any] = []
        running: list[Any] = []

        def turn() -> bool:
            running[:] = [request for request in running if not request.finished()]
            for i in range(
                len(requests), min(len(requests) + self.concurrency - len(running), self.requests)
            ):
                requests.append(submit(i, 1024))
                running.append(requests[-1])
            return len(requests) == self.requests

        engine.finish(requests, turn)
        answers = [list(request.output_ids) for request in requests]
        return [Answer(tokens, tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in answers]
