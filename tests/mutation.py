"""Mutation of what decides: ``python -m tests.mutation core/jobs``; 1 if under 95 % of a room's mutants are killed.

A mutant is one small change of one function, as mutmut makes it; a test that reaches the function must fail. All
happens in one process: the room's tests are imported and run once, which shows what each reaches and how long it takes;
then each mutant gets a fork, in which the function has its code, and the tests of that function run, those first that
noticed the one before, then the quickest, until one fails. Properties have fewer examples, always the same. What
survives is printed, unless `SAME` names it. More words: other tests than the room's (``tests/...``); only functions
whose name holds one of them.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import libcst
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings
from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.file_mutation import MutationVisitor, mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

from tests.mutation_rooms import ROOMS, ROOT, SAME

WANTED = 0.95
EXAMPLES = 40  # of a property, at most
AT_ONCE = 2
OFTEN = 6  # so many tests that noticed the function's last mutants are the first for its next
ALIVE = ("survived", "unreached")
QUIET = ["-q", "-p", "no:cacheprovider", "--no-header", "--no-summary"]
QUIET += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this file has imported Hypothesis
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


# -- what is changed ---------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A function with one change."""

    module: str
    function: str  # its qualified name
    before: str  # the lines that differ
    after: str
    source: str  # the function, in its classes

    @property
    def name(self):
        return f"{self.module.removeprefix('resilient.')}.{self.function}"


def mutants(room):
    """Every mutant of a room."""
    for place in room.places:
        path = ROOT / "resilient" / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            every = mutants_of(module, file.read_text())
            yield from (one for one in every if re.search(room.functions, one.name))


def mutants_of(module, text):
    tree = MetadataWrapper(libcst.parse_module(text), unsafe_skip_copy=True)
    visitor = MutationVisitor(mutation_operators, IgnoredCode(set(), set(), set()))
    tree.visit(visitor)
    places = tree.resolve(WhitespaceInclusivePositionProvider)
    lines, functions = text.splitlines(keepends=True), dict(spans(ast.parse(text).body))
    for change in visitor.mutations:
        start, end = places[change.original_node].start, places[change.original_node].end
        first, last = start.line - 1, end.line - 1
        if start.line not in functions:
            continue  # what is done once, when the module is imported
        name, top, bottom = functions[start.line]
        margin = re.match(" *", lines[first])[0]
        fresh = tree.module.code_for_node(change.mutated_node).replace("\n", "\n" + margin)
        after = lines[first][: start.column] + fresh + lines[last][end.column :]
        before = "".join(lines[first : last + 1])
        source = "".join([*classes_of(name), *lines[top:first], after, *lines[last + 1 : bottom]])
        if "cast(" in source and untyped(source) == untyped("".join([*classes_of(name), *lines[top:bottom]])):
            continue
        yield Mutant(module, name, *differing(before, after), source)


def spans(body, outer=""):
    """Each line of a function, with the function's qualified name, its first line and its end."""
    for node in body:
        if isinstance(node, FUNCTION):
            lines = range(node.lineno, node.end_lineno + 1)
            yield from ((line, (outer + node.name, node.lineno - 1, node.end_lineno)) for line in lines)
        elif isinstance(node, ast.ClassDef):
            yield from spans(node.body, f"{outer}{node.name}.")


def classes_of(name):
    """What a function's lines need above them."""
    return ["    " * depth + f"class {one}:\n" for depth, one in enumerate(name.split(".")[:-1])]


def untyped(source):
    """What a function does: the types of its casts are for type checkers."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cast" and len(node.args) > 1:
            node.args[0] = ast.Constant(None)
    return ast.dump(tree)


def differing(before, after):
    """The lines in which two texts differ."""
    one, two = ([line.strip() for line in text.strip("\n").split("\n")] for text in (before, after))
    while one and two and one[0] == two[0]:
        del one[0], two[0]
    while one and two and one[-1] == two[-1]:
        del one[-1], two[-1]
    return " | ".join(one), " | ".join(two)


# -- how it is changed -------------------------------------------------------------------------------------------------


def function_of(module, name):
    """The function that runs, whatever decorates it in its class."""
    owner = importlib.import_module(module)
    *classes, last = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    function = vars(owner)[last]
    return inspect.unwrap(getattr(function, "__func__", function))


def put_in(mutant):
    """Give the function the mutant's code; False if it is the same code."""
    function = function_of(mutant.module, mutant.function)
    tree = ast.parse(mutant.source)
    arguments, world = node_of(tree).args, dict(function.__globals__)
    code = code_of(compiled(tree), mutant.function)
    defaults = tuple(eval(ast.unparse(one), world) for one in arguments.defaults)  # noqa: S307 - our own
    named = {
        argument.arg: eval(ast.unparse(one), world)  # noqa: S307 - our own
        for argument, one in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if one is not None
    }
    old = bare(function.__code__), function.__defaults__ or (), function.__kwdefaults__ or {}
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named
    return (bare(code), defaults, named) != old


def telling(function, name, teller):
    """The function's code, with a call of that global before all else."""
    lines, _ = inspect.getsourcelines(function)
    tree = ast.parse("".join([*classes_of(name), *lines]))
    body = node_of(tree).body
    call = ast.copy_location(ast.Expr(ast.Call(ast.Name(teller, ast.Load()), [], [])), body[0])
    body.insert(0, ast.fix_missing_locations(call))
    return code_of(compiled(tree), name)


def compiled(tree):
    return compile(tree, "a mutant", "exec", flags=annotations.compiler_flag, dont_inherit=True)


def node_of(tree):
    """The function, in its classes."""
    node = tree
    while not isinstance(node, FUNCTION):
        node = node.body[-1]
    return node


def code_of(code, name):
    """The code of the function in that of its classes."""
    inner = [one for one in code.co_consts if hasattr(one, "co_code")]
    return next(
        one if one.co_qualname == name else code_of(one, name) for one in inner if name.startswith(one.co_qualname)
    )


def bare(code):
    """What it does, without where it stands."""
    consts = tuple(bare(one) if hasattr(one, "co_code") else repr(one) for one in code.co_consts)
    return code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable


# -- the tests ---------------------------------------------------------------------------------------------------------


class Trial:
    """A plugin of pytest: instead of each test once, each mutant with the tests that reach its function."""

    def __init__(self, mutants):
        self.mutants = mutants
        self.results = {}  # number of a mutant -> "killed", "survived", "unreached" or "same"
        self._reached = defaultdict(list)  # module and function -> (seconds, test)

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if not is_shared(item)]
        for item in items:
            shorten(item)

    def pytest_runtestloop(self, session):
        self._look(session.items)
        gc.collect()
        gc.freeze()
        for path, pid in [self._fork(range(n, len(self.mutants), AT_ONCE)) for n in range(AT_ONCE)]:
            os.waitpid(pid, 0)
            self.results |= pickle.loads(path.read_bytes())  # noqa: S301 - our own
            path.unlink()
        return True

    def _look(self, items):
        """Run every test once, with functions that say that they are called."""
        called, originals = set(), []
        for number, key in enumerate(dict.fromkeys((one.module, one.function) for one in self.mutants)):
            function = function_of(*key)
            originals.append((function, function.__code__))
            function.__globals__[f"_called_{number}"] = partial(called.add, key)
            function.__code__ = telling(function, key[1], f"_called_{number}")
        for item, following in zip(items, [*items[1:], items[0]], strict=True):
            called.clear()
            began = time.process_time()
            for report in runtestprotocol(item, nextitem=following, log=False):
                if report.failed:
                    raise SystemExit(f"{item.nodeid} fails without a mutant: {report.longreprtext}")
            for key in called:
                self._reached[key].append((time.process_time() - began, item))
        for function, code in originals:
            function.__code__ = code

    def _fork(self, numbers):
        """A process that tries these one after the other, and the file where it writes what came of them."""
        handle, path = tempfile.mkstemp()
        os.close(handle)
        pid = os.fork()
        if pid == 0:
            try:
                Path(path).write_bytes(pickle.dumps(dict(self._tried(numbers))))
            finally:
                os._exit(0)
        return Path(path), pid

    def _tried(self, numbers):
        first = defaultdict(list)  # module and function -> the tests that noticed, the last one first
        for number in numbers:
            mutant = self.mutants[number]
            key = mutant.module, mutant.function
            tests = sorted(self._reached[key], key=lambda pair: pair[0])
            items = [*first[key], *(item for _, item in tests if item not in first[key])]
            result, index = try_one(mutant, items, 2 + 5 * sum(took for took, _ in tests))
            if index is not None:
                first[key] = [items[index], *(item for item in first[key] if item is not items[index])][:OFTEN]
            yield number, result


def try_one(mutant, items, seconds):
    """What becomes of a mutant with these tests and so much CPU time, and the number of the test that failed."""
    if not items:
        return "unreached", None
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # these end the process
        signal.alarm(60 + int(20 * seconds))
        code = 3
        try:
            code = fails(mutant, items, writing)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        index = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "survived", 2: "same"}.get(code, "killed"), int(index) if index else None


def fails(mutant, items, pipe):
    """1 if a test fails, 0 if none does, 2 if there is nothing to notice."""
    if not put_in(mutant):
        return 2
    others = [*items[1:], next(one for one in items[0].session.items if one is not items[-1])]
    for index, (item, following) in enumerate(zip(items, others, strict=True)):
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
            os.write(pipe, str(index).encode())
            return 1
    return 0


def is_shared(item):
    """Whether it uses PostgreSQL: forks would share one connection, and the names of databases, and fail by that."""
    return "postgres" in item.name or "postgres_server" in getattr(item, "fixturenames", ())


def shorten(item):
    """Fewer examples of a property, always the same, and none made smaller."""
    owners = ((item.obj, "_hypothesis_internal_use_settings"), (getattr(item, "cls", None), "settings"))
    for owner, name in ((getattr(one, "__func__", one), name) for one, name in owners):
        old = getattr(owner, name, None)
        if isinstance(old, settings):
            fewer, phases = min(EXAMPLES, old.max_examples), (Phase.explicit, Phase.generate)
            setattr(owner, name, settings(old, max_examples=fewer, derandomize=True, database=None, phases=phases))


# -- what came of it ---------------------------------------------------------------------------------------------------


def main():
    room, *words = sys.argv[1:]
    tests = [word for word in words if word.startswith("tests/")]
    names = [word for word in words if word not in tests]
    some = [one for one in mutants(ROOMS[room]) if not names or any(name in one.name for name in names)]
    trial = Trial(some)
    pytest.main([*QUIET, *(tests or ROOMS[room].tests)], plugins=[trial])
    if not trial.results:
        sys.exit("no mutant was tried")
    counts = Counter()
    for number, mutant in enumerate(some):
        result = trial.results[number]
        if result in ALIVE and not is_named(mutant):
            sys.stdout.write(f"{result} {mutant.name}\n- {mutant.before}\n+ {mutant.after}\n")
        elif result in ALIVE:
            result = "named"
        counts[result] += 1
    judged = counts["killed"] + counts["survived"] + counts["unreached"]
    share = counts["killed"] / max(1, judged)
    sys.stdout.write(
        f"{room}: {share:.1%} of {judged:,} killed, {counts['survived']} survived, {counts['unreached']} unreached, "
        f"{counts['named']} more named; {time.process_time() + sum(os.times()[2:4]):.0f} s of CPU\n"
    )
    sys.exit(share < WANTED)


def is_named(mutant):
    return any(mutant.name.endswith(name) and line in mutant.after for name, line in SAME)


if __name__ == "__main__":
    main()
