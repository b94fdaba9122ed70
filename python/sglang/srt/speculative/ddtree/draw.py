"""Draws a draft tree of a trace as SVG: its nodes by depth, and which of them the target accepted.

python -m sglang.srt.speculative.ddtree.draw TRACE [--step N] [--request ID] [--tokenizer FOLDER] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from sglang.srt.speculative.ddtree.trace import read_trace

COLUMN, ROW, MARGIN, BOX = 120, 26, 16, 96  # pixels
TEXT_LENGTH = 12  # characters of a token that fit its box
ACCEPTED, OTHER, TEXT = "#1a7f37", "#c8ccd0", "#1f2328"


def find_tree(path: Path, step: int | None, request: str | None) -> tuple[int, dict[str, Any]]:
    """Find a tree in a trace.

    Args:
        path: the file of the trace.
        step: its number; None: the first one that has the request and a draft.
        request: the request's id; None: the first of the step.

    Returns:
        The step's number, and the request's entry.

    Raises:
        ValueError: there is no such tree.
    """
    steps = 0
    for line in read_trace(path):
        if "step" not in line:
            continue
        steps += 1
        if step is not None and line["step"] != step:
            continue
        for entry in line["requests"]:
            if request in (None, entry["id"]) and (step is not None or len(entry["tokens"]) > 1):
                return line["step"], entry
    wanted = "a step with a draft" if step is None else f"step {step}"
    owner = "" if request is None else f" of request {request}"
    raise ValueError(f"{path}: expected {wanted}{owner}, got a trace of {steps} steps without it")


def rows_of(parents: list[int]) -> list[float]:
    """Place the nodes of a tree: leaves below each other, and a parent at the height of its first child.

    Args:
        parents: the parent of each node, parents before children; -1 for the root.

    Returns:
        The row of each node, from 0.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows = [0.0] * len(parents)
    leaves = 0
    stack = [0]
    while stack:  # depth first
        node = stack.pop()
        rows[node] = leaves
        if not children[node]:
            leaves += 1
        stack.extend(reversed(children[node]))
    return rows


def draw(entry: dict[str, Any], title: str, name: Callable[[int], str] = str) -> str:
    """Draw a tree.

    Args:
        entry: the tree, as find_tree() returns it.
        title: the text above the tree.
        name: returns the text of a token.

    Returns:
        An SVG document. The more probable the drafter thought a node, given its parent, the thicker its line.
    """
    tokens, parents, path = entry["tokens"], entry["parents"], entry["path"]
    depths = [0] * len(tokens)
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
    rows, accepted = rows_of(parents), set(path)
    bonus = (depths[path[-1]] + 1, rows[path[-1]]) if path else None
    top = MARGIN + ROW

    def at(depth: int, row: float) -> tuple[float, float]:
        return MARGIN + depth * COLUMN, top + row * ROW

    def box(depth: int, row: float, token: int, color: str, dashed: bool = False) -> str:
        x, y = at(depth, row)
        text = escape(name(token)[:TEXT_LENGTH])
        style = ' stroke-dasharray="3 2"' if dashed else ""
        return (
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{ROW - 6}" rx="4" fill="white" stroke="{color}"{style}/>'
            f'<text x="{x + 6:.0f}" y="{y + 14:.0f}">{text}</text>'
        )

    def line(node: int) -> str:
        x0, y0 = at(depths[parents[node]], rows[parents[node]])
        x1, y1 = at(depths[node], rows[node])
        color = ACCEPTED if node in accepted else OTHER
        probability = entry["probabilities"][node]
        return (
            f'<path d="M{x0 + BOX:.0f} {y0 + 10:.0f} H{x1 - 12:.0f} V{y1 + 10:.0f} H{x1:.0f}" fill="none" '
            f'stroke="{color}" stroke-width="{0.5 + 4 * probability:.1f}"><title>{probability:.3f}</title></path>'
        )

    parts = [line(node) for node in range(1, len(tokens))]
    parts += [
        box(depths[node], rows[node], token, ACCEPTED if node in accepted else OTHER)
        for node, token in enumerate(tokens)
    ]
    if bonus is not None and entry["emitted"]:
        # At the height of the last accepted node, or below the tree if a node is there.
        depth, row = bonus
        taken = {rows[node] for node in range(len(tokens)) if depths[node] == depth}
        row = max(rows) + 1 if row in taken else row
        parts.append(box(depth, row, entry["emitted"][-1], ACCEPTED, dashed=True))
    width = 2 * MARGIN + (max(depths) + 1) * COLUMN + BOX
    height = top + (max(rows) + 2) * ROW + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="monospace" '
        f'font-size="12" fill="{TEXT}"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="{MARGIN + 8}">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def text_of_tokens(tokenizer: str) -> Callable[[int], str]:
    """Return a function from a token to its text.

    Args:
        tokenizer: the folder or repository that has the tokenizer.

    Raises:
        ValueError: it has none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer: expected a folder or repository with a tokenizer, got {tokenizer}: {error}"
        ) from None
    return lambda token: repr(loaded.decode([token]))[1:-1]


def main(arguments: list[str] | None = None) -> None:
    """Draw the tree that the command line names.

    Args:
        arguments: the arguments of the command line; None takes those of the process.

    Raises:
        SystemExit: an argument is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.speculative.ddtree.draw",
        description="Draw a draft tree of a trace as SVG.",
    )
    parser.add_argument("trace", type=Path, help="a file that --speculative-ddtree-trace wrote")
    parser.add_argument("--step", type=int, help="number of the step; default: the first one with a draft")
    parser.add_argument("--request", help="id of the request; default: the first one of the step")
    parser.add_argument("--tokenizer", help="folder of the target; default: show token ids instead of text")
    parser.add_argument("--output", type=Path, help="SVG file to write; default: standard output")
    options = parser.parse_args(arguments)
    try:
        step, entry = find_tree(options.trace, options.step, options.request)
        name = str if options.tokenizer is None else text_of_tokens(options.tokenizer)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    lengths = f"{len(entry['tokens'])} nodes, {len(entry['emitted'])} tokens emitted"
    text = draw(entry, f"step {step}, request {entry['id']}: {lengths}", name)
    if options.output is None:
        sys.stdout.write(text)
        return
    try:
        options.output.write_text(text)
    except OSError as error:
        parser.error(f"--output: expected a file that can be written, got {options.output}: {error}")


if __name__ == "__main__":
    main()
