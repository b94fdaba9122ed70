"""The documents name files, headings and modules that exist."""

import re
import subprocess
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from tools.upstream import ROOT

register_cpu_ci(est_time=15, suite="unit")

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"(?ms)^```.*?^```")
# The packages whose modules docs/design.md lists.
LISTED = ("speculative/ddtree", "model_executor/graph_guard")


def pages() -> dict[Path, str]:
    """Return the text of each Markdown file that git tracks, without blocks of code."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        ROOT / name: FENCE.sub("", (ROOT / name).read_text()) for name in listed.stdout.split("\0") if name
    }


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


class TestDocs(CustomTestCase):
    def test_links(self):
        texts = pages()
        self.assertGreater(len(texts), 20)
        for page, text in texts.items():
            for link in LINK.findall(text):
                if "://" in link:
                    continue
                name, _, anchor = link.partition("#")
                target = (page.parent / name).resolve() if name else page
                with self.subTest(page=str(page.relative_to(ROOT)), link=link):
                    self.assertTrue(target.exists(), "expected a file or folder")
                    if anchor:
                        self.assertIn(anchor, anchors(texts[target]))

    def test_design_lists_every_module(self):
        design = (ROOT / "docs/design.md").read_text()
        for package in LISTED:
            names = {path.name for path in (ROOT / "python/sglang/srt" / package).glob("[a-z]*.py")}
            self.assertGreater(len(names), 5)
            self.assertEqual({name for name in names if f"`{name}`" not in design}, set())

    def test_an_anchor_is_spelled_as_github_does(self):
        self.assertEqual(anchors("# A b\n\n### 1. Race: `--x RE.json`\n"), {"a-b", "1-race---x-rejson"})


if __name__ == "__main__":
    unittest.main()
