"""No upstream code in this repository, and the check would find some."""

from __future__ import annotations

import subprocess
import unittest

from support.tools_case import ROOT, UPSTREAM, ToolsCase, register_cpu_ci

from tools.provenance import RUN, check, copies, essence
from tools.upstream import Pins, Release

register_cpu_ci(est_time=15, suite="unit")

THEIRS = "\n".join(f"    value_{i} = compute(value_{i - 1}, {i})" for i in range(1, 20))


class TestCopies(unittest.TestCase):
    def find(self, ours: str, name: str = "ours.py", theirs: str = THEIRS):
        return copies({name: ours}, {"sglang/theirs.py": theirs})

    def lines(self, count: int, first: int = 3) -> str:
        return "\n".join(THEIRS.split("\n")[first : first + count])

    def test_a_run_of_six_is_found_and_five_are_not(self):
        self.assertEqual(self.find(f"x = 1\n{self.lines(RUN - 1)}\ny = 1\n"), [])
        found = self.find(f"x = 1\n{self.lines(RUN)}\ny = 1\n")
        self.assertEqual(
            [(c.path, c.line, c.count, c.source) for c in found], [("ours.py", 2, RUN, "sglang/theirs.py")]
        )
        self.assertIn("ours.py:2: 6 lines are also in upstream's sglang/theirs.py", str(found[0]))

    def test_a_longer_run_is_one_finding(self):
        self.assertEqual([c.count for c in self.find(self.lines(15))], [15])

    def test_neither_indentation_nor_trivial_lines_hide_it(self):
        hidden = [
            f"\t\t{' '.join(line.split())}\n\nimport os\n    )\n" for line in self.lines(RUN).split("\n")
        ]
        self.assertEqual([c.line for c in self.find("".join(hidden))], [1])

    def test_patches_and_kernels_are_checked_too(self):
        self.assertEqual(len(self.find("+" + self.lines(RUN).replace("\n", "\n+"), "x.patch")), 1)
        self.assertEqual(len(self.find(self.lines(RUN), "x.cuh")), 1)

    def test_six_lines_apart_are_not_a_run(self):
        apart = [f"{line}\nmine_{i} = {i}\n" for i, line in enumerate(self.lines(RUN).split("\n"))]
        self.assertEqual(self.find("".join(apart)), [])

    def test_what_is_trivial(self):
        trivial = [
            "",
            "    )",
            "}",
            "});",
            '"""',
            "// ----",
            "import os",
            "from a.b import (",
            "#include <x.h>",
            "#pragma once",
        ]
        trivial += ["else:", "} else {", "try:", "return", "break;", "# SPDX-License-Identifier: Apache-2.0"]
        trivial += [
            "# Copyright 2023-2024 SGLang Team",
            "using namespace cute;",
            '# Licensed under the Apache License, "2"',
        ]
        self.assertEqual(essence("\n".join(trivial)), [])
        real = [
            "x = 1",
            "return x",
            "import_it()",
            "@torch.no_grad()",
            "if x:",
            "// the reason",
            "#define X 1",
            "elsewhere()",
        ]
        self.assertEqual([line for _, line in essence("\n".join(real))], real)


class TestCheckouts(ToolsCase):
    def test_a_copy_in_a_checkout(self):
        self.release({"0.5.23": UPSTREAM | {"sglang/theirs.py": THEIRS.replace("    ", "")}})
        subprocess.run(["git", "init", "-q"], cwd=self.root, check=True)
        self.patchset("provenance")
        self.write("sgl-kernel/csrc/ours.cu", THEIRS)
        self.assertIn(
            "sgl-kernel/csrc/ours.cu:1: 19 lines are also in", self.patchset("provenance", status=1)
        )

    def test_outside_git(self):
        self.refused("provenance", says="needs a git checkout")

    def test_further_sources(self):
        subprocess.run(["git", "init", "-q"], cwd=self.root, check=True)
        self.write("docs/ours.md", THEIRS)
        other = self.tmp / "other"
        other.mkdir()
        self.refused("provenance", "--also", other, says="expected a folder with source files")
        (other / "a.cuh").write_text(THEIRS)
        self.assertIn("docs/ours.md:1: 19 lines", self.patchset("provenance", "--also", other, status=1))

    def test_this_repository(self):
        upstream = Release.get(Pins.load())
        self.assertEqual([str(copy) for copy in check(ROOT, upstream)], [])

    def test_a_copy_in_this_repository_would_be_found(self):
        # Plants a real function of upstream among our files and compares with the real wheel.
        upstream = Release.get(Pins.load())
        name = "sglang/srt/plugins/hook_registry.py"
        source = upstream.read(name).decode()
        found = copies({"planted.py": "\n".join(source.split("\n")[60:120])}, {name: source})
        self.assertEqual([(c.path, c.source) for c in found], [("planted.py", name)])


if __name__ == "__main__":
    unittest.main()
