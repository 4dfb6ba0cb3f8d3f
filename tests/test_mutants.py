"""The faults that benchmarks/mutants.py plants: each kind once, and source that still compiles."""

import ast
import runpy

from tests.documents import ROOT

TOOL = runpy.run_path(str(ROOT / "benchmarks" / "mutants.py"), run_name="mutants")
SOURCE = '''\
def share(x: int, limit: float = 2.0, least: float = 0.0) -> bool:
    """Noise ε + 1."""
    if not x < limit:
        raise ValueError(f"x must be below {limit + 1}")
    note(x)
    return x * 3 > 1 and True
'''


def test_every_kind_of_fault_is_planted_once_and_messages_are_left_alone():
    found = list(TOOL["find_mutants"]("share.py", SOURCE.encode()))
    changed = [mutant.apply(SOURCE.encode()).decode() for mutant in found]
    assert all(ast.parse(text) and text != SOURCE for text in changed)
    assert {(x.line, x.kind, x.old, x.new) for x in found} == {
        (1, "constant", "2.0", "4.0"),
        (1, "constant", "0.0", "1.0"),
        (3, "check dropped", "not x < limit", "False"),
        (3, "operator", "not ", ""),
        (3, "comparison", "<", "<="),
        (5, "call left out", "note(x)", "pass"),
        (6, "operator", "and", "or"),
        (6, "operator", "*", "/"),
        (6, "comparison", ">", ">="),
        (6, "constant", "3", "4"),
        (6, "constant", "1", "2"),
        (6, "constant", "True", "False"),
    }


def test_a_sample_repeats_and_takes_lines_that_tests_reach():
    found = list(TOOL["find_mutants"]("share.py", SOURCE.encode()))
    lines = {3: ["a test"], 6: ["a test"]}
    chosen = TOOL["choose"](found, 4, lines)
    assert chosen == TOOL["choose"](found, 4, lines)
    assert len(chosen) == 4 and {mutant.line for mutant in chosen} <= set(lines)
    # Kinds take turns.
    assert len({mutant.kind for mutant in chosen}) == 4
