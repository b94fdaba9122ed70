"""A wrong list or object in a request's body costs one report, and what the routes accept is what upstream's models accept."""

import json
import unittest
from typing import Annotated

from fastapi import Body
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from sglang.srt.entrypoints.http_server import app
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=30, suite="unit")

BODIES = {
    "/generate": {"text": "a"},
    "/v1/completions": {"model": "m", "prompt": "a"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"model": "m", "input": "a"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG = [
    ("/v1/responses", "input", lambda n: [0] * n),
    ("/v1/responses", "include", lambda n: ["x"] * n),
    ("/v1/chat/completions", "messages", lambda n: [{}] * n),
    ("/v1/chat/completions", "messages", lambda n: [{"role": "user", "content": [0] * n}]),
    ("/v1/completions", "prompt", lambda n: [{}] * n),
    ("/v1/completions", "logit_bias", lambda n: {str(i): [] for i in range(n)}),
    ("/generate", "input_ids", lambda n: ["a"] * n),
]
RIGHT = [
    ("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": [{"n": 1}, {"n": 2}]}),
    ("/v1/completions", {"prompt": ["a", "b"], "stop": ["a"], "logit_bias": {"1": 2}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": {}}], "input": [{}]}),
]


def body_field(path):
    return next(route.body_field for route in app.routes if getattr(route, "path", "") == path)


class TestFirstError(CustomTestCase):
    def test_a_wrong_collection_costs_one_report(self):
        client = TestClient(app)
        for path, field, wrong in WRONG:
            with self.subTest(path=path, field=field):
                answers = [client.post(path, json=BODIES[path] | {field: wrong(n)}) for n in (1, 300)]
                self.assertEqual([answer.status_code for answer in answers], [400, 400])
                one, many = (answer.text.count("'loc'") for answer in answers)
                self.assertGreater(one, 0)
                self.assertEqual(one, many)

    def test_right_bodies_are_parsed_as_before(self):
        for path, change in RIGHT:
            with self.subTest(path=path, change=json.dumps(change)):
                field = body_field(path)
                upstream = TypeAdapter(Annotated[field.field_info.annotation, Body()])
                expected = upstream.validate_python(BODIES[path] | change)
                parsed, errors = field.validate(BODIES[path] | change)
                self.assertEqual(errors, [])
                self.assertEqual(type(parsed), type(expected))
                for name, value in vars(expected).items():
                    if name not in ("request_id", "rid"):
                        self.assertEqual(getattr(parsed, name), value, name)


if __name__ == "__main__":
    unittest.main()
