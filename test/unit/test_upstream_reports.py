"""The fixes in docs/upstream are ready to send: they apply to the pinned release and hold no line of upstream."""

import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci

from tools.upstream import Pins, Release

register_cpu_ci(est_time=5, suite="unit")

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "docs" / "upstream"
TREE = "python/"  # sglang's wheel holds the content of this folder of upstream's repository


def patched_files(patch: Path) -> list[str]:
    return re.findall(r"(?m)^\+\+\+ b/(\S+)$", patch.read_text())


class PatchTest(unittest.TestCase):
    def setUp(self):
        self.patches = sorted(REPORTS.glob("*.patch"))
        self.assertTrue(self.patches)

    def test_patches_only_add_lines_and_have_no_context(self):
        allowed = re.compile(r"\+|--- a/\S+$|@@ -\d+,0 \+\d+(,\d+)? @@$")
        for patch in self.patches:
            wrong = [line for line in patch.read_text().splitlines() if not allowed.match(line)]
            self.assertEqual(wrong, [], patch.name)

    def test_patches_apply_to_the_pinned_release(self):
        release = Release.get(Pins.load(ROOT))
        for patch in self.patches:
            files = [name for name in patched_files(patch) if name.startswith(TREE)]
            if not files:
                continue  # another project's
            with self.subTest(patch=patch.name), tempfile.TemporaryDirectory() as folder:
                for name in files:
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True)
                    path.write_bytes(release.read(name.removeprefix(TREE)))
                command = ["git", "apply", "--unidiff-zero", "-p1", str(patch)]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
                for name in files:
                    source = Path(folder, name).read_text()
                    compile(source, name, "exec")
                    self.assertNotEqual(source.encode(), release.read(name.removeprefix(TREE)))

    def test_every_patch_belongs_to_a_report_that_names_related_work(self):
        for patch in self.patches:
            text = patch.with_suffix(".md").read_text()
            self.assertIn(patch.name, text)
            self.assertRegex(text, r"(?m)^## Related work$")


if __name__ == "__main__":
    unittest.main()
