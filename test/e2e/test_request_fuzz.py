"""No request ends the server, whatever its fields hold.

Every field that the server's OpenAPI document names gets hostile values, one field at a time and in pairs. A plain request
with top_k shares their batches, because some values only end a server in company.

Environment variables change a run: SGLANG_FUZZ_REQUESTS (how many), SGLANG_FUZZ_SEED, SGLANG_FUZZ_BASE=1 (a server without
DDTREE), SGLANG_FUZZ_RANGE (sends only these requests, such as 1600-1640, to replay a failure), and SGLANG_FUZZ_RECORD (a file
for the statuses of the answers).
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import requests
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.models import write_models

from tools import demo_model

register_cpu_ci(est_time=420, suite="e2e")

PORT = int(os.environ.get("SGLANG_TEST_PORT", "21090")) + 13
URL = f"http://127.0.0.1:{PORT}"
REQUESTS = int(os.environ.get("SGLANG_FUZZ_REQUESTS", "5000"))
SEED = int(os.environ.get("SGLANG_FUZZ_SEED", "12"))
PER_CHECK = 40  # requests between two looks at the server
PER_COMPANION = 20  # requests that share their batches with one that is plain
CLIENTS = 4
SECONDS = 60  # for one answer


def nested(open, close, depth):
    return open * depth + close * depth


class Raw(str):
    """JSON text that json.dumps would not write."""


DEEP_LIST, DEEP_OBJECT = (
    Raw(nested("[", "]", 20_000)),
    Raw(nested('{"a":', "}", 20_000).replace(":}", ":1}", 1)),
)
VALUES = [
    None, True, "", " ", "a", "ab-c01", "unknown", "\0", "\ud800", "x" * 1_000_000, 0, -1, 1, 7, 300, 2**31, 2**63, 2**64, -(2**63),
    0.5, -0.5, 1e-30, 1e308, float("nan"), float("inf"), float("-inf"), [], {}, [None], [""], ["a"], [0], [-1], [2**31], [2**63],
    [[]], [[0]], [[-1]], [[2**31]], [{}], [0] * 100_000, [{}] * 10_000, ["a"] * 100, {"a": None}, {"0": 1e308}, {"-1": 1}, {"2147483648": 1},
    {"0": float("nan")}, {"type": "unknown"}, {"type": "object"}, '{"type": "object"}', "[", "(", "a{1000000}", "(a*)*b",
    nested("(", ")", 5000), nested("[", "]", 5000), nested('{"a":', "}", 5000), 'root ::= root "a"', 'root ::= ' + nested("(", ")", 5000),
    DEEP_LIST, DEEP_OBJECT, {"id": "s", "rid": None, "offset": -1, "replace": True}, "http://127.0.0.1:9/x", "data:image/png;base64,AAAA",
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
EXAMPLES = {
    "/generate": {"input_ids": [3, 10, 7, 12], "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
    "/v1/completions": {"model": "m", "prompt": [3, 10, 7, 12], "max_tokens": 4},
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "user", "content": "ab-c"}],
        "max_tokens": 4,
    },
    "/v1/responses": {"model": "m", "input": "ab-c", "max_output_tokens": 4},
    "/v1/embeddings": {"model": "m", "input": "ab-c"},
}
# Fields that count only in company.
COMPANY = {
    "/generate": [
        {"return_logprob": True},
        {"stream": True},
        {"text": "ab", "input_ids": None},
        {"input_ids": [[3, 4], [5]]},
        {"sampling_params": {"temperature": 1, "max_new_tokens": 4}},
        {"sampling_params": {"min_new_tokens": 2, "max_new_tokens": 4}},
        {"sampling_params": {"n": 2, "max_new_tokens": 4}},
    ],
    "/v1/completions": [{"logprobs": 2, "echo": True}, {"stream": True}, {"prompt": "ab"}, {"temperature": 1, "min_tokens": 2}],
    "/v1/chat/completions": [
        {"logprobs": True, "top_logprobs": 2},
        {"stream": True},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
    ],
    "/v1/responses": [
        {"stream": True},
        {"tools": [{"type": "function", **TOOL["function"]}]},
        {"input": [{"role": "user", "content": "ab"}]},
    ],
    "/v1/embeddings": [{"input": ["a", "b"]}],
}  # fmt: skip


# Each of these changes of the first example ended a server without our checks.
ENDED_A_SERVER = [
    {"input_ids": None, "text": ""},
    {"input_ids": [-1]},
    {"input_ids": [49_152]},
    {"input_ids": [[]]},
    {"custom_labels": {"a": "b"}},
    {"positional_embed_overrides": {}},
    {"sampling_params": {"top_k": 2**31}},
    {"sampling_params": {"min_new_tokens": 2, "stop_token_ids": [1_000_000]}},
    {"return_logprob": True, "top_logprobs_num": 60_000},
    {"return_logprob": True, "logprob_start_len": -5},
]
# These ended a server that ran COMPANION in the same batch. They are refused, or the grammar ends this one request.
ENDED_A_SERVER_IN_COMPANY = [
    ({"sampling_params": {"ebnf": 'root ::= root "a"'}}, 500),
    ({"sampling_params": {"ebnf": 'root ::= "a" x\nx ::= x "a"'}}, 500),
    ({"sampling_params": {"logit_bias": {"5": 3e38}, "temperature": 0.5}}, 400),
    ({"sampling_params": {"repetition_penalty": 1e-38}}, 400),
    ({"sampling_params": {"min_new_tokens": 2, "stop_token_ids": list(range(49_152))}}, 400),
]


class Request(NamedTuple):
    path: str
    body: bytes
    label: str


# With top_k, the sampler of the batch is the one that raises when a probability is NaN.
COMPANION = Request(
    "/generate",
    json.dumps(
        {"input_ids": [3, 4], "sampling_params": {"top_k": 20, "max_new_tokens": 40, "ignore_eos": True}}
    ).encode(),
    "companion",
)


def fields(document: dict) -> dict[str, dict[tuple, set]]:
    """Each field of each endpoint's body, as its path, with the JSON types that the OpenAPI document gives it; as deep as three,
    and the sampling parameters, whose types it does not give.
    """
    schemas = document["components"]["schemas"]

    def choices(schema):
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        yield schema
        for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from choices(inner)

    def walk(schema, path):
        for choice in choices(schema):
            for name, inner in choice.get("properties", {}).items():
                types = {one.get("type") for one in choices(inner)} - {None, "null"}
                found[(*path, name)] = found.get((*path, name), set()) | types
                if len(path) < 2:
                    walk(inner, (*path, name))
            if "items" in choice and len(path) < 2:
                walk(choice["items"], (*path, 0))

    all_found = {}
    for path in EXAMPLES:
        found = all_found[path] = {}
        walk(document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"], ())
    all_found["/generate"] |= {("sampling_params", name): set() for name in SamplingParams.__struct_fields__}
    return all_found


def json_type(value) -> str | None:
    if isinstance(value, Raw):
        return "array" if value.startswith("[") else "object"
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return types.get(type(value))


def put(body, path, value):
    """Set one field of `body`; containers on the way are made."""
    *way, last = path
    for step, following in zip(way, path[1:]):
        new = [{}] if following == 0 else {}
        inner = body[0] if step == 0 else body.get(step)
        if not isinstance(inner, type(new)) or not inner:
            inner = new
            body[step] = inner
        body = inner
    body[last] = value


def to_json(body) -> bytes:
    raw = {}

    def replace(value):
        if isinstance(value, Raw):
            key = f"<raw {len(raw)}>"
            raw[json.dumps(key)] = str(value)
            return key
        if isinstance(value, dict):
            return {name: replace(inner) for name, inner in value.items()}
        if isinstance(value, list) and len(value) < 100:
            return [replace(inner) for inner in value]
        return value

    text = json.dumps(replace(body))
    for key, value in raw.items():
        text = text.replace(key, value)
    return text.encode()


def shown(value) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}... ({len(text)})"


def make(path, settings, company=None) -> Request:
    body = json.loads(json.dumps(EXAMPLES[path] | (company or {})))
    for field, value in settings:
        put(body, field, value)
    label = ", ".join(f"{'.'.join(map(str, field))}={shown(value)}" for field, value in settings)
    return Request(path, to_json(body), f"{path} {label} {'with ' + shown(company) if company else ''}")


def plan(document: dict, count: int, seed: int) -> list[Request]:
    """`count` requests with hostile fields, half of them with one and half with two or with one in company.

    Two values in three are of a type that the field takes: others are refused early.
    """
    chance = random.Random(seed)
    found = fields(document)
    weights = [len(fields_) for fields_ in found.values()]

    def setting(path):
        field = chance.choice(list(found[path]))
        types = found[path][field]
        fitting = [value for value in VALUES if json_type(value) in types or not types]
        return field, chance.choice(fitting if fitting and chance.random() < 2 / 3 else VALUES)

    planned = []
    while len(planned) < count:
        path = chance.choices(list(found), weights)[0]
        alone = chance.random() < 0.5
        company = None if alone else chance.choice([None, *COMPANY[path]])
        settings = [setting(path) for _ in range(1 if alone or (company and chance.random() < 0.5) else 2)]
        try:
            planned.append(make(path, settings, company))
        except (TypeError, AttributeError, KeyError, IndexError):
            continue  # one field is inside the other's value
    return planned


class TestRequestFuzz(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        # A model that answers within milliseconds, with a real tokenizer and chat template.
        demo = demo_model.prepare(demo_model.default_folder())
        vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
        target, drafter = write_models(cls.folder, vocabulary=vocabulary)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(demo / name, target)
        speculation = [
            "--speculative-algorithm",
            "DDTREE",
            "--speculative-draft-model-path",
            drafter,
            "--speculative-num-draft-tokens",
            "8",
        ]
        cls.command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--port", str(PORT), "--device", "cpu",
            *([] if os.environ.get("SGLANG_FUZZ_BASE") else speculation),
            # A short context ends the answers that a hostile field makes long.
            "--dtype", "float32", "--context-length", "128", "--max-total-tokens", "2048", "--max-running-requests", "8",
            "--mem-fraction-static", "0.1", "--enable-metrics", "--skip-server-warmup", "--log-level", "error",
            "--served-model-name", "m", "--tool-call-parser", "qwen25",
        ]  # fmt: skip
        cls.start()
        cls.addClassCleanup(lambda: kill_process_tree(cls.server.pid))

    @classmethod
    def start(cls):
        # popen_launch_server, and CustomTestCase for an attribute `process`, would end the test when the server dies.
        cls.log = cls.folder / "server.log"
        with cls.log.open("w") as log:
            environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
            cls.server = subprocess.Popen(cls.command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and cls.server.poll() is None:
            try:
                if requests.get(f"{URL}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{cls.log.read_text()[-4000:]}")

    def send(self, request: Request) -> int:
        """The answer's status; 0: none came."""
        try:
            answer = requests.post(
                URL + request.path,
                request.body,
                headers={"Content-Type": "application/json"},
                timeout=SECONDS,
            )
            return answer.status_code
        except requests.RequestException:
            return 0

    def lives(self) -> bool:
        """Whether the server answers a plain request. One whose scheduler died answers nothing, for a minute and longer."""
        if self.server.poll() is not None:
            return False
        children = psutil.Process(self.server.pid).children(recursive=True)
        if any(child.status() == psutil.STATUS_ZOMBIE for child in children):
            return False
        try:
            body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}}
            # It can have to wait for hundreds of samples of earlier requests.
            return requests.post(f"{URL}/generate", json=body, timeout=5 * SECONDS).status_code == 200
        except requests.RequestException:
            return False

    def send_together(self, some: list[Request]) -> list[int]:
        """The statuses of the answers to `some`, which share their batches with COMPANION."""
        mixed = []
        for at in range(0, len(some), PER_COMPANION):
            mixed += [COMPANION, *some[at : at + PER_COMPANION]]
        with ThreadPoolExecutor(CLIENTS) as clients:
            statuses = list(clients.map(self.send, mixed))
        return [status for request, status in zip(mixed, statuses) if request is not COMPANION]

    def last_words(self) -> str:
        """How the server ended: the last error of its log, and its exit code or its dead children."""
        errors = re.findall(
            r"(?m)^(?:Fatal Python error|(?:\w+\.)*\w*(?:Error|Exception|Fault|fault|Aborted|Killed)).*$",
            self.log.read_text(errors="replace"),
        )
        words = errors[-1][:200] if errors else "no error in its log"
        if (code := self.server.poll()) is not None:
            return f"{words} (exit code {code})"
        children = psutil.Process(self.server.pid).children(recursive=True)
        dead = [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]
        return f"{words} (running, dead children: {dead})"

    def restart(self):
        kill_process_tree(self.server.pid)
        type(self).server.wait()
        self.start()

    def culprits(self, suspects: list[Request]) -> list[str]:
        """Those of `suspects` that end a server in COMPANION's company; none if it takes several."""
        found = []
        for request in suspects:
            self.send_together([request])
            if not self.lives():
                found.append(f"{request.label}: {self.last_words()}")
                print(found[-1], file=sys.stderr, flush=True)
                self.restart()
        return found

    def test_plain_requests_are_answered(self):
        """Else a hostile field would meet a refusal of something else."""
        for path, example in EXAMPLES.items():
            for company in ({}, *COMPANY[path]):
                answer = requests.post(URL + path, json=example | company, timeout=SECONDS)
                expected = 400 if path == "/v1/embeddings" else 200  # the model is none for embeddings
                self.assertEqual(answer.status_code, expected, f"{path} {company}: {answer.text}")

    def test_what_once_ended_a_server_is_refused(self):
        for change in ENDED_A_SERVER:
            with self.subTest(change=shown(change)):
                body = to_json(EXAMPLES["/generate"] | change)
                self.assertEqual(self.send(Request("/generate", body, "")), 400)
        self.assertTrue(self.lives())

    def test_what_once_ended_a_server_in_company_ends_alone(self):
        for change, expected in ENDED_A_SERVER_IN_COMPANY:
            with self.subTest(change=shown(change)):
                body = to_json(EXAMPLES["/generate"] | change)
                statuses = self.send_together([Request("/generate", body, "")] * 4)
                self.assertEqual(statuses, [expected] * 4)
                self.assertTrue(self.lives(), self.last_words())

    def test_no_request_ends_the_server(self):
        document = requests.get(f"{URL}/openapi.json", timeout=60).json()
        planned = plan(document, REQUESTS, SEED)
        ended, statuses = [], {}
        first, end = map(int, os.environ.get("SGLANG_FUZZ_RANGE", f"0-{REQUESTS}").split("-"))
        for at in range(first, end, PER_CHECK):
            some = planned[at : min(at + PER_CHECK, end)]
            for request, status in zip(some, self.send_together(some)):
                statuses.setdefault(status, []).append(request.label)
            if not self.lives():
                together = (
                    f"SGLANG_FUZZ_RANGE={at}-{at + len(some)}, which takes several: {self.last_words()}"
                )
                print(together, file=sys.stderr, flush=True)
                self.restart()
                ended += self.culprits(some) or [together]
        print({status: len(labels) for status, labels in statuses.items()})
        if path := os.environ.get("SGLANG_FUZZ_RECORD"):
            Path(path).write_text(json.dumps({"ended": ended, "statuses": statuses}, indent=1))
        self.assertEqual(ended, [])


if __name__ == "__main__":
    unittest.main()
