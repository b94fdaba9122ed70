"""The grammar of a tool call holds the arguments to the tool's schema where the call is forced."""

import unittest

from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="unit")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = ToolChoice.model_validate({"type": "function", "function": {"name": "f"}})


def tool(**function):
    return Tool.model_validate({"type": "function", "function": {"name": "f", **function}})


class TestForcedToolCall(CustomTestCase):
    def schemas(self, tool, choice):
        constraint = FunctionCallParser([tool], "qwen25").get_structure_constraint(choice)
        if constraint is None:
            return None
        kind, tag = constraint
        self.assertEqual(kind, "structural_tag")
        return [structure["schema"] for structure in tag.model_dump(by_alias=True)["structures"]]

    def test_a_forced_call_has_the_schema_of_its_tool(self):
        for choice in ("required", NAMED):
            for strict in (False, True):
                with self.subTest(choice=choice, strict=strict):
                    self.assertEqual(self.schemas(tool(parameters=SCHEMA, strict=strict), choice), [SCHEMA])

    def test_a_tool_without_a_schema_takes_anything(self):
        self.assertEqual(self.schemas(tool(), "required"), [{}])

    def test_a_free_choice_is_as_upstream_has_it(self):
        self.assertIsNone(self.schemas(tool(parameters=SCHEMA), "auto"))
        self.assertEqual(self.schemas(tool(parameters=SCHEMA, strict=True), "auto"), [SCHEMA])


if __name__ == "__main__":
    unittest.main()
