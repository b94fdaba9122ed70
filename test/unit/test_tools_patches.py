"""The patch series and the overlay: what is accepted, and what is refused without changing anything."""

from __future__ import annotations

import unittest

from support.tools_case import PATCH, UPSTREAM, ToolsCase, register_cpu_ci

from tools.errors import ToolError
from tools.patch import Hunk, Patch, merge
from tools.patchset import main
from tools.series import BUDGET
from tools.symbols import MODULE, changed, symbols

register_cpu_ci(est_time=30, suite="unit")

SECOND = PATCH.replace("Engine.start", "Engine.stop").replace("@@ -7,0 +8,2", "@@ -11,0 +12,2")


class TestSymbols(unittest.TestCase):
    SOURCE = "import os\nclass A:\n    x = 1\n    def f(self):\n        def g(): pass\n        return g\nif os:\n    def h(): pass\n"

    def test_names(self):
        self.assertEqual(set(symbols(self.SOURCE)), {"A", "A.f", "h", MODULE})

    def test_layout_does_not_count(self):
        again = "import os  # why\n\n\nclass A:\n    x = 1\n\n    def f(self):\n        def g():\n            pass\n        return (g)\n"
        self.assertEqual(
            changed(self.SOURCE.encode(), (again + "if os:\n    def h(): pass\n").encode()), set()
        )

    def test_digest_is_the_same_under_every_python(self):
        digest = symbols("def f(x):\n    return f'{x}' or None\n")["f"].digest
        self.assertEqual(digest, "229ef73ce7d217a6e818f049e78899cc31c5e45920be27218709b67d9b32575e")

    def test_a_change_is_the_innermost_symbols(self):
        for old, new, name in (
            ("return g", "return g()", "A.f"),
            ("x = 1", "x = 2", "A"),
            ("def g(): pass", "def g(): return", "A.f"),
            ("if os:", "if not os:", MODULE),
            ("def h(): pass", "def h(): return", "h"),
            ("    def f(self)", "    @property\n    def f(self)", "A.f"),
        ):
            with self.subTest(new):
                self.assertIn(old, self.SOURCE)
                self.assertEqual(
                    changed(self.SOURCE.encode(), self.SOURCE.replace(old, new).encode()), {name}
                )


class TestParse(unittest.TestCase):
    def stops(self, text: str, says: str) -> None:
        with self.assertRaises(ToolError) as caught:
            Patch.parse("cpu/x.patch", text)
        self.assertIn(says, str(caught.exception))
        self.assertIn("patches/cpu/x.patch", str(caught.exception))

    def test_format_is_the_inverse(self):
        patch = Patch.parse("cpu/x.patch", PATCH)
        self.assertEqual(patch.format(), PATCH)
        self.assertEqual(patch.fields["Description"], "Count the starts\nand nothing else")
        self.assertEqual(patch.seams, [("sglang.srt.engine", "Engine.start")])
        self.assertEqual([h.after for h in patch.hunks["sglang/srt/engine.py"]], [7])

    def test_added_lines_that_look_like_a_diff(self):
        text = PATCH.replace("+        count()\n", "+--- a/x\n").replace(
            "+        from sglang.srt.ours import count", "+@@ -1 +1 @@"
        )
        self.assertEqual(
            Patch.parse("cpu/x.patch", text).hunks["sglang/srt/engine.py"][0].lines,
            ("@@ -1 +1 @@", "--- a/x"),
        )

    def test_refusals(self):
        hunk = "@@ -7,0 +8,2 @@"
        for text, says in (
            (PATCH + " import os\n", "context line"),
            (PATCH + "-import os\n", "removed line"),
            (PATCH.replace("+        count()", "         count()"), "context line"),
            (PATCH.replace("+        count()", "-        count()"), "removed line"),
            (PATCH.replace(hunk, "@@ -7,2 +7,2 @@"), "context or removed lines"),
            (PATCH.replace(hunk, hunk + " def start(self):"), "text after the second @@"),
            (PATCH.replace(hunk, "@@ -7,0 +8,3 @@"), "ends before"),
            (PATCH.replace(hunk, "@@ -7,0 +8,1 @@"), "more lines than its @@"),
            (PATCH.replace("Remove-When: upstream counts them\n", ""), "lacks Remove-When"),
            (PATCH.replace("Author: sglang-ddtree authors", "Author:"), "lacks Author"),
            (PATCH.replace("Author", "Writer"), "expected a header field of"),
            (PATCH.replace("Seam: sglang.srt.engine:Engine.start", "Seam: Engine.start"), "module:Qual.name"),
            (PATCH.partition("---")[0], "ends before"),
            (
                PATCH + "--- a/sglang/srt/engine.py\n+++ b/sglang/srt/engine.py\n@@ -1,0 +2 @@\n+x\n",
                "once per file",
            ),
            (PATCH.replace("+++ b/sglang/srt", "+++ b/sglang"), "expected '--- a/PATH'"),
            (PATCH + "@@ -3,0 +6 @@\n+import x\n", "must ascend"),
        ):
            with self.subTest(says):
                self.assertNotEqual(text, PATCH)
                self.stops(text, says)


class TestMerge(unittest.TestCase):
    def patch(self, name: str, *hunks: tuple[int, str]) -> Patch:
        return Patch(name, {}, {"f": [Hunk(after, (line,)) for after, line in hunks]})

    def test_line_numbers_are_upstreams_whatever_the_others_add(self):
        a, b = self.patch("a", (0, "top"), (2, "a")), self.patch("b", (1, "b"), (2, "after a"))
        data, numbers = merge(b"1\n2\n", [a, b], "f")
        self.assertEqual(data, b"top\n1\nb\n2\na\nafter a\n")
        self.assertEqual(numbers, {"a": [1, 5], "b": [3, 6]})

    def test_line_ends_are_the_files(self):
        self.assertEqual(merge(b"1\r\n2\r\n", [self.patch("a", (1, "x"))], "f")[0], b"1\r\nx\r\n2\r\n")

    def test_no_such_line(self):
        for source, after in ((b"1\n", 2), (b"1\n2", 2)):
            with self.assertRaisesRegex(ToolError, f"no line {after}"):
                merge(source, [self.patch("a", (after, "x"))], "f")


class TestCommands(ToolsCase):
    def test_apply_and_check(self):
        self.add()
        self.patchset("check")
        self.patchset("apply", self.tmp / "out")
        got = (self.tmp / "out/sglang/srt/engine.py").read_text().split("\n")
        self.assertEqual(got[7:9], ["        from sglang.srt.ours import count", "        count()"])
        self.assertEqual("\n".join(got[:7] + got[9:]).encode(), self.upstream.read("sglang/srt/engine.py"))
        self.assertEqual([p.name for p in self.tmp.glob("out/**/*") if p.is_file()], ["engine.py"])

    def test_refresh_puts_in_normal_form_and_is_idempotent(self):
        self.add(PATCH.replace("+8,2 @@", "+99,2 @@ def start(self, port):"))
        self.assertEqual((self.root / "patches/cpu/count-starts.patch").read_text(), PATCH)
        self.assertEqual(self.series.names, ["cpu/count-starts.patch"])
        before = self.snapshot()
        self.patchset("refresh")
        self.assertEqual(self.snapshot(), before)

    def test_patches_do_not_depend_on_each_other(self):
        self.add()
        self.add(SECOND, "ddtree/count-stops.patch")
        self.patchset("check")
        both = self.series.assemble(self.upstream)["sglang/srt/engine.py"]
        (self.root / "patches/cpu/count-starts.patch").unlink()
        self.patchset("refresh")
        self.patchset("check")
        one = self.series.assemble(self.upstream)["sglang/srt/engine.py"]
        self.assertEqual([text.count(b"count()") for text in (both, one)], [2, 1])

    def test_bad_patches_change_nothing(self):
        self.add()
        for text, says in (
            (PATCH + "-import os\n", "removed line"),
            (PATCH.replace("+        count()", "         count()"), "context line"),
            (
                PATCH.replace("+        count()", "+        count("),
                "is not valid Python after cpu/count-starts.patch",
            ),
            (PATCH.replace("@@ -7,0 +8,2", "@@ -700,0 +8,2"), "has no line 700"),
            (PATCH.replace("srt/engine.py", "srt/motor.py"), "has no sglang/srt/motor.py"),
        ):
            with self.subTest(says):
                bad = self.write("patches/cpu/count-starts.patch", text)
                for command in (
                    ["check"],
                    ["dev", self.tmp / "d"],
                    ["build", self.tmp / "d"],
                    ["apply", self.tmp / "d"],
                ):
                    self.refused(*command, says=says)
                self.refused("refresh", says=says)
                bad.write_text(PATCH)

    def test_what_was_recorded_must_come_out(self):
        self.add()
        self.write("patches/cpu/count-starts.patch", PATCH.replace("        count()", "        count() "))
        self.refused("dev", self.tmp / "d", says="differs from patches/post.sha256 once patched")
        self.write("patches/cpu/count-starts.patch", PATCH)
        self.release({"0.5.23": UPSTREAM | {"sglang/srt/engine.py": "\n" + UPSTREAM["sglang/srt/engine.py"]}})
        self.refused("dev", self.tmp / "d", says="is not the file that the patches are for: run the rebase")

    def test_check_names_what_breaks_a_rule(self):
        five = "".join(f"+        x{i} = 1\n" for i in range(4))
        for text, says in (
            (
                PATCH.replace("Engine.start", "Engine.stop"),
                "it changes Engine.start of sglang/srt/engine.py, unlike its Seam",
            ),
            (PATCH.replace("Engine.start", "Engine.start, sglang.srt.engine:run"), "does not change run of"),
            (
                PATCH.replace("Engine.start", "Engine.begin"),
                "Seam sglang.srt.engine:Engine.begin is not in sglang 0.5.23",
            ),
            (PATCH.replace("8,2 @@", "8,6 @@") + five, "6 lines are added to Engine.start"),
            (PATCH.replace("ours:count", "ours:reckon"), "Calls sglang.srt.ours:reckon is not under"),
            (
                PATCH.replace("_patches.py", "_missing.py"),
                "Test test/unit/test_tools_missing.py does not exist",
            ),
        ):
            with self.subTest(says):
                self.add(text)
                self.assertIn(says, self.patchset("check", status=1))
        self.add()
        self.write("patches/graph/stray.patch", SECOND)
        self.refused("check", says="patches/graph/stray.patch is not in the series")

    def test_five_lines_are_allowed_per_function(self):
        self.add(PATCH.replace("8,2 @@", "8,5 @@") + "".join(f"+        x{i} = 1\n" for i in range(3)))
        self.patchset("check")

    def test_what_is_called_may_be_defined_assigned_or_imported(self):
        self.write("python/sglang/srt/more.py", "class Bare: pass\n")
        for text in (
            "from .more import Bare as count\n",
            "count = 1\n",
            "count: int\n",
            "async def count(): pass\n",
        ):
            self.write("python/sglang/srt/ours.py", text)
            self.add()
            self.patchset("check")
        self.write("python/sglang/srt/ours.py", "def other():\n    count = 1\n")
        self.assertIn("Calls sglang.srt.ours:count", self.patchset("check", status=1))

    def test_budget(self):
        for i in range(BUDGET):
            self.write(f"patches/cpu/p{i}.patch", PATCH)
        self.patchset("refresh")
        self.write("patches/cpu/one-more.patch", PATCH)
        self.refused("refresh", says=f"the series has {BUDGET + 1} patches and the budget is {BUDGET}")

    def test_overlay_that_upstream_has(self):
        for path, says in (
            ("sglang/srt/engine.py", "would replace sglang/srt/engine.py"),
            ("sglang/srt/cache.py", "would replace sglang/srt/cache/__init__.py"),
            ("sglang/srt/engine/__init__.py", "would replace sglang/srt/engine.py"),
            ("sglang/srt/engine.py/ours.txt", "would replace sglang/srt/engine.py"),
            ("sglang/data", "would replace sglang/data"),
        ):
            with self.subTest(path):
                bad = self.write(f"python/{path}", "")
                for command in (["check"], ["refresh"], ["dev", self.tmp / "d"], ["build", self.tmp / "d"]):
                    self.refused(*command, says=says)
                bad.unlink()
                if bad.parent.name == "engine.py" or bad.parent.name == "engine":
                    bad.parent.rmdir()

    def test_missing_patch_file(self):
        self.add()
        (self.root / "patches/cpu/count-starts.patch").unlink()
        self.refused("check", says="lists cpu/count-starts.patch, which does not exist")


class TestThisRepository(unittest.TestCase):
    def test_keeps_every_rule(self):
        self.assertEqual(main(["check"]), 0)


class TestEdit(ToolsCase):
    def edit(self, name: str, folder: str, after: str, *lines: str) -> None:
        """Open the patch and add `lines` after the line `after` of engine.py, like a person would."""
        self.patchset("edit", name, "--dir", self.root / folder)
        path = self.root / folder / "sglang/srt/engine.py"
        text = path.read_text()
        self.assertEqual(text.count(after), 1)
        path.write_text(text.replace(after, after + "".join(f"        {line}\n" for line in lines)))

    def fill(self, folder: str) -> None:
        """Complete the header template."""
        header = self.root / folder / "HEADER"
        text = header.read_text().replace("our_module:function", "ours:count")
        header.write_text(text.replace("test_....py", "test_tools_patches.py"))

    def test_a_new_patch(self):
        self.edit(
            "cpu/new.patch", "build/e", "def stop(self):\n", "from sglang.srt.ours import count", "count()"
        )
        self.fill("build/e")
        self.patchset("export", "--dir", self.root / "build/e")
        self.patchset("check")
        self.assertEqual(self.series.patches[0].seams, [("sglang.srt.engine", "Engine.stop")])

    def test_two_at_a_time_and_a_change(self):
        self.add()
        self.edit("cpu/a.patch", "build/a", "def stop(self):\n", "a = 1")
        self.edit("cpu/b.patch", "build/b", "self.port = None\n", "b = 1")
        for folder in ("build/a", "build/b"):
            self.fill(folder)
            self.patchset("export", "--dir", self.root / folder)
        self.patchset("check")
        text = self.series.assemble(self.upstream)["sglang/srt/engine.py"].decode()
        self.assertEqual([text.count(s) for s in ("count()", "a = 1", "b = 1")], [1, 1, 1])
        self.edit("cpu/a.patch", "build/a2", "        a = 1\n", "a2 = 2")
        self.patchset("export", "--dir", self.root / "build/a2")
        self.patchset("check")
        self.assertEqual(
            self.series.read("cpu/a.patch").hunks["sglang/srt/engine.py"],
            [Hunk(11, ("        a = 1", "        a2 = 2"))],
        )

    def test_the_tree_runs_and_diff_is_the_patch(self):
        self.add()
        self.patchset("edit", "cpu/count-starts.patch", "--dir", self.root / "build/e")
        tree = self.root / "build/e"
        self.assertEqual((tree / "sglang/srt/ours.py").read_text(), "def count():\n    pass\n")
        before = self.snapshot()
        self.patchset("export", "--dir", self.root / "build/e")
        self.assertEqual(self.snapshot(), before)

    def test_refusals(self):
        self.add()
        self.refused("edit", "new.patch", says="FOLDER/PURPOSE.patch")
        self.refused("export", says="was not made by")
        self.patchset("edit", "cpu/x.patch", "--dir", self.root / "build/e")
        self.fill("build/e")
        self.refused("edit", "cpu/x.patch", "--dir", self.root / "build/e", says="is in use")
        self.refused("export", "--dir", self.root / "build/e", says="nothing to export")
        path = self.root / "build/e/sglang/srt/engine.py"
        text = path.read_text()
        first = "        from sglang.srt.ours import count\n"
        for changed_text, says in (
            (text.replace("import os\n", ""), "removes line 1"),
            (text.replace("size = 3", "size = 4"), "alters or removes line 5"),
            (text.replace(first, first + "        x = 1\n"), "between those of another patch"),
            (text.replace("import os\n", "import os\nimport (\n"), "is not valid Python after cpu/x.patch"),
        ):
            with self.subTest(says):
                path.write_text(changed_text)
                self.refused("export", "--dir", self.root / "build/e", says=says)
        path.write_text(text)
        self.write("build/e/sglang/srt/new.py", "")
        self.refused("export", "--dir", self.root / "build/e", says="new.py is a new file")


if __name__ == "__main__":
    unittest.main()
