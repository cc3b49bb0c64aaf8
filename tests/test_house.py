"""The house stands straight: no circles of files, no reaching into each other's private parts, no way back to the app.

Imports for types alone count: whoever reads a file has to know what its types are.
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST_CIRCLE = 2  # files that import each other, directly or around
FOREIGN = {"_transport", "_pool", "_connected"}  # of httpx and httpcore, which have no public names for them
BELOW_SURFACE = ("core", "store", "wire", "engine")
APP = "resilient.engine.app.app"


@cache
def modules():
    """Name to path, of everything that is installed."""
    paths = [path for top in ("resilient", "providers") for path in (ROOT / top).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def tree(name):
    return ast.parse(modules()[name].read_text())


def imports(name):
    """The modules that one imports: each with the names that are taken from it."""
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
    found = {}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            for one in node.names:
                found.setdefault(one.name, set()).add("")
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            for one in node.names:
                whole = f"{base}.{one.name}"
                found.setdefault(whole if whole in modules() else base, set()).add(one.name)
    return {target: names for target, names in found.items() if target in modules() and target != name}


def circles(graph):
    """The sets of modules each of which reaches all the others (Tarjan's strongly connected components)."""
    index, low, stack, found = {}, {}, [], []

    def visit(one):
        index[one] = low[one] = len(index)
        stack.append(one)
        for other in graph[one]:
            if other not in index:
                visit(other)
            if other in stack:
                low[one] = min(low[one], low[other])
        if low[one] == index[one]:
            circle = stack[stack.index(one) :]
            del stack[stack.index(one) :]
            found.append(circle)

    for one in graph:
        if one not in index:
            visit(one)
    return [circle for circle in found if len(circle) > 1]


def test_circles_are_seen():
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["a"]}
    assert sorted(sorted(circle) for circle in circles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_no_files_stand_in_a_large_circle():
    """54 files of the engine once stood in one: none could be read, moved or tested without the others."""
    graph = {name: sorted(imports(name)) for name in modules()}
    assert len(graph) > 200
    assert [sorted(circle) for circle in circles(graph) if len(circle) > LARGEST_CIRCLE] == []


def test_nothing_below_the_surface_knows_the_app():
    """Features stand on the ground; what the app hands to handlers as ``job.app`` is nobody's type."""
    assert APP in modules()
    below = [name for name in modules() if name.startswith(tuple(f"resilient.{floor}." for floor in BELOW_SURFACE))]
    assert [name for name in below if name != APP and APP in imports(name)] == []
    assert [name for name in below if any("Resilient" in names for names in imports(name).values())] == []


def own_private_names(name):
    """The private attributes and functions that a module defines."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__, getattr
            found.add(node.value)
    return {one for one in found if re.fullmatch(r"_[a-z][a-z0-9_]*", one)}


def reaches(name):
    """Lines that reach into what another of our files calls private: ruff's SLF001, but for foreign libraries."""
    own = own_private_names(name)
    lines = modules()[name].read_text().splitlines()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            excused = "SLF001" in lines[node.lineno - 1] or "SLF001" in lines[node.end_lineno - 1]
            if excused and node.attr not in own | FOREIGN and node.attr in private_of_others(name):
                yield f"{modules()[name].relative_to(ROOT)}:{node.lineno}: {node.attr}"


@cache
def every_private_name():
    return {name: own_private_names(name) for name in modules()}


def private_of_others(name):
    return set().union(*(names for other, names in every_private_name().items() if other != name))


def test_no_file_reaches_into_the_private_parts_of_another():
    assert [line for name in modules() for line in reaches(name)] == []


PARTICIPLES = {
    "asked",
    "found",
    "given",
    "heard",
    "held",
    "known",
    "left",
    "owed",
    "said",
    "seen",
    "taken",
    "told",
    "wanted",
}
WORDS = PARTICIPLES | {"ear", "mine", "ours", "theirs", "voice"}


def words(name):
    """Where a module binds such a word as the name of a value: a variable or a parameter."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        elif isinstance(node, ast.arg):
            bound = node.arg
        else:
            continue
        if bound in WORDS:
            yield f"{modules()[name].relative_to(ROOT)}:{node.lineno}: {bound}"


def test_a_value_is_named_by_a_noun():
    """``found`` says of a value only that it was looked for: ``rows``, ``policy`` or ``account`` says what it is."""
    places = {}
    for name in sorted(modules()):
        places.setdefault(name.removeprefix("resilient.").split(".")[0], []).extend(words(name))
    too_many = {part: lines for part, lines in places.items() if lines}
    assert too_many == {}, "\n".join(line for lines in too_many.values() for line in lines)


def rooms():
    """The rooms that are folders: name to docstring."""
    floors = tuple(f"resilient.{floor}" for floor in BELOW_SURFACE)
    return {
        name: ast.get_docstring(tree(name))
        for name, path in modules().items()
        if path.name == "__init__.py" and name.rpartition(".")[0] in floors
    }


def test_each_room_says_what_it_owns_what_it_uses_and_where_to_begin():
    for name, docstring in rooms().items():
        owns, uses, begin = docstring.split("\n\n", 2)
        assert owns.endswith("."), name
        assert uses.startswith("May use: "), name
        assert begin.startswith("Begin with: "), name
        files = re.findall(r"`([a-z_0-9]+\.py)`", begin)
        missing = [file for file in files if not (modules()[name].parent / file).exists()]
        assert missing == [], f"{name} says to begin with {missing}"


def test_a_room_says_the_truth_about_what_it_uses():
    """A room imports none of its floor but those it names; "every room" names them all."""
    for name, docstring in rooms().items():
        if "every room" in docstring or "all other rooms" in docstring:
            continue
        floor, _, own = name.rpartition(".")
        every = {one.rpartition(".")[2] for one in modules() if one.rpartition(".")[0] == floor}
        named = set(re.findall(r"`([a-z]+)`", docstring.split("\n\n")[1])) & every
        used = {
            target.removeprefix(f"{floor}.").split(".")[0]
            for one in modules()
            if one == name or one.startswith(f"{name}.")
            for target in imports(one)
            if target.startswith(f"{floor}.")
        } - {own}
        assert not named or used <= named, f"{name} uses {sorted(used - named)} too"


OWNED = {"follow_ups", "work", "over", "is_answered"}  # what an execution changes by verbs of its own


def test_an_execution_is_changed_in_one_file():
    """Four files once wrote what becomes of an execution: whoever read one of them did not know who else did."""
    run = "resilient.engine.run."
    writers = {
        (name.removeprefix(run), node.attr)
        for name in modules()
        if name.startswith(run)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNED
    }
    assert writers == {("execution", attribute) for attribute in OWNED}
