"""The pages that are made when the site is built: out of the code, so that they cannot differ from it.

- ``apis/``: one page for each provider, of its facts, in the words of `resilient providers show`.
- ``reference/``: the public names by topic; mkdocstrings fills in their docstrings and signatures.
- ``errors.md``: what can be raised, what `why` and `doctor` say, and the remedy, read in the source.

mkdocs calls `on_files` (see `hooks` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import resilient
from resilient import Provider, Resilient, providers_by_name
from resilient.core.base import errors
from resilient.surface.cli.providers import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "resilient"

# Page, title, and the modules (below `resilient`) whose public names it has. A name is on the first page that
# takes it; what nobody takes is with the app.
TOPICS = (
    ("handlers", "Handlers and jobs", ("engine.app.handler", "engine.run.job", "engine.ground.kinds",
                                       "core.jobs.backoff")),
    ("app", "The app and its workers", ("engine.app", "engine.run.worker", "engine.schedules", "core.inspect.retention",
                                        "core.alerts", "engine.ground.encoder", "core.base.tracing",
                                        "core.base.loggers")),
    ("workflows", "Workflows", ("engine.jobs.workflows", "core.jobs.workflow")),
    ("records", "What the app answers", ("core.jobs", "core.inspect", "core.schedules", "store.jobs")),
    ("gates", "Limits and circuits", ("core.gates.policy", "core.gates.rate_limit")),
    ("accounts", "Accounts and credentials", ("core.accounts", "engine.accounts")),
    ("sync", "Streams and pages", ("core.sync", "engine.sync", "engine.run.stream_reader")),
    ("events", "Events and webhooks", ("engine.events", "core.events.message", "wire.publishers", "core.events")),
    ("facts", "Facts about a provider", ("core.provider", "core.gates", "core.base.budgets", "core.base.exchange",
                                         "core.base.instants", "engine.ground.providers")),
    ("errors", "Exceptions", ("core.base.errors",)),
)  # fmt: skip
MODULES = (
    ("testing", "resilient.testing", "resilient.testing"),
    ("web", "resilient.web", "resilient.web"),
    ("metrics", "resilient.metrics", "resilient.metrics"),
    ("django", "resilient.django", "resilient.django"),
    ("settings", "resilient.settings", "resilient.settings"),
    ("adapters", "resilient.adapters", "resilient.adapters.requests resilient.adapters.aiohttp"),
)
PARTS = (
    "jobs", "resources", "workflows", "streams", "schedules", "connections", "webhooks", "outbox", "inbox", "alerts",
    "audit", "accounts",
)  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and name them in the navigation."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the tests import this file without mkdocs

    for path, text in made().items():
        files.append(File.generated(config, path, content=text))
    for section in config.nav or []:
        if "Reference" in section:
            pages = [f"reference/{name}.md" for name, *_ in (*TOPICS, *MODULES)]
            section["Reference"] = ["reference/index.md", *pages, *section["Reference"]]
            apis = sorted(path for path in made() if path.startswith("apis/") and path != "apis/index.md")
            config.nav.insert(config.nav.index(section), {"Known APIs": ["apis/index.md", *apis]})
            break
    return files


def made() -> dict[str, str]:
    """Every page that is made: its path to its Markdown."""
    return {**apis(), **reference(), "errors.md": messages()}


# -- providers ------------------------------------------------------------------------------------------------------


def apis() -> dict[str, str]:
    """One page for each installed provider, and a table of them all."""
    every = {name: make() for name, make in sorted(providers_by_name().items())}
    rows = [
        f"| [{one.title}]({name}.md) | {', '.join(dict.fromkeys(a.kind for a in one.auth)) or 'by its SDK'} "
        f"| {'yes' if one.idempotency else 'no'} | {'yes' if one.webhook else 'no'} | {one.verified_on or ''} |"
        for name, one in every.items()
    ]
    head = "| API | credentials | idempotency key | webhooks | read on |\n|---|---|---|---|---|\n"
    index = (
        f"# Known APIs\n\nWhat is known about {len(every)} APIs, each in a module of the package `providers`. "
        "How to use one, and how to write another: [Providers](../providers.md). In the terminal: "
        f"`resilient providers show NAME`.\n\n{head}" + "\n".join(rows) + "\n"
    )
    return {"apis/index.md": index, **{f"apis/{name}.md": api(name, one) for name, one in every.items()}}


def api(name: str, provider: Provider) -> str:
    """The page of one provider."""
    module = inspect.getmodule(providers_by_name()[name])
    about = inspect.cleandoc((module.__doc__ if module else "") or "").partition("\n")[2].strip()
    parts = [f"# {provider.title}", prose(about)]
    if provider.verified_on:
        parts.append(f"These facts were read on {provider.verified_on}.")
    account = name if provider.single_account else f"{name}/acct-7"
    use = f"{name}.provider({'client_id, client_secret' if provider.oauth is not None else ''})"
    parts.append(
        f"```python\nfrom providers import {name}\n\napp = Resilient(url, providers=[{use}])\n```\n\n"
        f"```console\n$ resilient --app shop.jobs:app connect {name} {account}\n```"
    )
    for heading, lines in facts_of(provider):
        parts += [f"## {heading}", "\n".join(f"- {escaped(line)}" for line in lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


# -- the Python reference -------------------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """The public names by topic, as mkdocstrings wants them."""
    topics = by_topic()
    pages = {}
    for name, title, _ in TOPICS:
        body = "".join(f"::: resilient.{one}\n\n" for one in topics[name])
        pages[f"reference/{name}.md"] = f"# {title}\n\n{body}" + (parts() if name == "app" else "")
    for name, title, modules in MODULES:
        hidden = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        body = "".join(
            (f"## {one}\n\n" if " " in modules else "") + f"::: {one}\n{hidden}\n" for one in modules.split()
        )
        pages[f"reference/{name}.md"] = f"# {title}\n\n{body}"
    listed = "\n".join(
        f"| [{title}]({name}.md) | {', '.join(f'`{one}`' for one in topics.get(name, ()))} |"
        for name, title, _ in (*TOPICS, *MODULES)
    )
    pages["reference/index.md"] = (
        "# Python reference\n\nMade from the docstrings. What is imported from `resilient`, and from the modules named "
        "below, is public; everything else may change without notice.\n\n| page | names |\n|---|---|\n" + listed + "\n"
    )
    return pages


def by_topic() -> dict[str, list[str]]:
    """Each public name under the topic that takes it."""
    topics: dict[str, list[str]] = {name: [] for name, *_ in TOPICS}
    imports = [one for one in ast.walk(ast.parse(inspect.getsource(resilient))) if isinstance(one, ast.ImportFrom)]
    homes = {alias.name: str(one.module).removeprefix("resilient.") for one in imports for alias in one.names}
    for name in resilient.__all__:
        home = homes[name]
        takers = (topic for topic, _, modules in TOPICS if any(f"{home}.".startswith(f"{one}.") for one in modules))
        topics[next(takers, "app")].append(name)
    for topic, _, modules in TOPICS:  # in the order of the modules, the chief one first
        ranked = [[one for one in topics[topic] if f"{homes[one]}.".startswith(f"{module}.")] for module in modules]
        topics[topic] = list(dict.fromkeys([*(one for names in ranked for one in names), *topics[topic]]))
    return topics


def parts() -> str:
    """What hangs on the app: ``app.jobs`` and the like."""
    app = Resilient("sqlite://")
    try:
        homes = {part: type(getattr(app, part)) for part in PARTS}
    finally:
        app.database.close_sync()
    return "".join(
        f"## app.{part}\n\n::: {cls.__module__}.{cls.__qualname__}\n    options:\n      show_root_heading: false\n"
        "      show_root_toc_entry: false\n      heading_level: 3\n\n"
        for part, cls in homes.items()
    )


# -- messages -------------------------------------------------------------------------------------------------------

Texts = dict[str, dict[str, None]]  # a name to its sentences, in order
NOT_HEARD = ("testing", "surface/bench", "surface/demo")  # by those who run a program

INTRODUCTION = """# Messages and remedies

What the engine says when something is wrong, by the exception that carries it, with what to do about it. Made from
the source when this site is built: `<...>` stands for what a message names. Search finds a message by any of its words.

Everything that is raised on purpose is a `resilient.ResilientError`; the tree of them is in the
[reference](reference/errors.md).
"""


def messages() -> str:  # noqa: C901 - one case for each place that holds sentences
    """Exceptions with their messages, the reasons of `why`, the findings of `doctor`."""
    tree = {cls.__name__: cls for cls in vars(errors).values() if is_error(cls)}
    texts: Texts = {}
    reasons: Texts = {}
    findings: Texts = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if any(path.is_relative_to(SOURCE / one) for one in NOT_HEARD):
            continue
        for scope, node in nodes(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in tree:  # also one that is returned
                    add(texts, name, sentences(first, scope))
                case ast.Call(func=ast.Name(id="Reason"), args=[ast.Constant(value=str(code)), text, *_]):
                    add(reasons, code, sentences(text, scope))
                case ast.match_case(pattern=ast.MatchValue(value=ast.Constant(value=str(gate))), body=body):
                    if path.name == "why.py":
                        add(reasons, gate, returned(body, scope))
                case ast.FunctionDef(name="_breaker_text", body=body):
                    add(reasons, "breaker", returned(body, node))
                case ast.AnnAssign(target=ast.Name(id="_REMEDIES"), value=ast.Dict(keys=keys, values=values)):
                    for key, value in zip(keys, values, strict=True):
                        name = key.id.lower() if isinstance(key, ast.Name) else "auth"
                        add(reasons, f"auth: {name}", [one[0].upper() + one[1:] for one in sentences(value, scope)])
                case ast.Call(func=ast.Name(id="Finding"), args=[ast.Constant(value=str(name)), level, text, remedy]):
                    if not (isinstance(level, ast.Constant) and level.value == "ok"):
                        both = [f"{a} -> {b}" for a in sentences(text, scope) for b in sentences(remedy, scope)]
                        add(findings, name, both)
    return "\n".join(
        [
            INTRODUCTION,
            *(exception(cls, texts.get(name, {})) for name, cls in tree.items()),
            "## What `why` says\n\n`resilient jobs why ID` and `app.jobs.why(id)`: a stable code and a sentence.\n",
            table(("code", "sentences"), reasons),
            "## What `doctor` finds\n\n`resilient doctor` names what is wrong, and what to do.\n",
            table(("finding", "what is wrong, and the remedy"), findings),
        ]
    )


def returned(body: list[ast.stmt], scope: ast.AST) -> list[str]:
    """The sentences that a block returns."""
    returns = [node.value for part in body for node in ast.walk(part) if isinstance(node, ast.Return)]
    return [text for value in returns if value is not None for text in sentences(value, scope)]


def exception(cls: type[BaseException], texts: dict[str, None]) -> str:
    """One exception: what it means, and what its messages are."""
    bases = " ".join(f"A `{base.__name__}`." for base in cls.__bases__ if base is not Exception)
    lines = "".join(f"- {span(one)}\n" for one in texts)
    return f"## {cls.__name__}\n\n{prose(inspect.cleandoc(cls.__doc__ or ''))} {bases}\n\n{lines}"


def add(texts: Texts, name: str, every: list[str]) -> None:
    """More sentences under a name, each once, in order."""
    texts.setdefault(name, {}).update(dict.fromkeys(every))


def nodes(node: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node with the function it is in."""
    scope = scope or node
    for one in ast.iter_child_nodes(node):
        yield scope, one
        yield from nodes(one, one if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) else scope)


def is_error(cls: Any) -> bool:
    """Whether it is one of the library's exceptions."""
    return isinstance(cls, type) and issubclass(cls, errors.ResilientError)


def sentences(node: ast.expr, scope: ast.AST) -> list[str]:
    """The texts that an expression may be; none if the source does not tell."""
    match node:
        case ast.Constant(value=str(text)):
            return [text] if len(text.split()) > 1 else []
        case ast.JoinedStr(values=values):
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else placeholder(one) for one in values)
            text = re.sub(r"(?<=\w)<", " <", text)  # what may be left out carries its own blank
            return [text] if re.search(r"\w+ \w+", re.sub(r"<[^>]*>", "", text)) else []
        case ast.IfExp(body=body, orelse=orelse):
            return [*sentences(body, scope), *sentences(orelse, scope)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [a + b for a in sentences(left, scope) for b in sentences(right, scope)]
        case ast.Name(id=name):
            before = [
                one
                for one in ast.walk(scope)
                if isinstance(one, ast.Assign)
                and one.lineno < node.lineno
                and [ast.unparse(target) for target in one.targets] == [name]
            ]
            latest = max(before, key=lambda one: one.lineno, default=None)
            return sentences(latest.value, scope) if latest is not None else []
    return []


def placeholder(node: ast.expr) -> str:
    """What stands in the place of a value: its name, where that says something."""
    value = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id != "self":
        return f"<{value.value.id} {value.attr}>".replace("_", " ")
    if isinstance(value, ast.Attribute | ast.Name):
        name = value.attr if isinstance(value, ast.Attribute) else value.id
        return f"<{name.strip('_').lower().replace('_', ' ')}>"
    return "<...>"


def table(heads: tuple[str, str], rows: dict[str, dict[str, None]]) -> str:
    """Codes in order, each with its sentences."""
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    for name, texts in sorted(rows.items()):
        if texts:
            said = "<br>".join(escaped(one).replace(" -&gt; ", " **Remedy:** ") for one in texts)
            lines.append(f"| `{name}` | {said} |")
    return "\n".join(lines) + "\n"


# -- Markdown -------------------------------------------------------------------------------------------------------


def span(text: str) -> str:
    """A text in a code span, whatever it has."""
    return f"`` {' '.join(text.split())} ``"


def prose(text: str) -> str:
    """A docstring as Markdown: double backquotes are single ones."""
    return text.replace("``", "`")


def escaped(text: str) -> str:
    """A line that Markdown shows as it is, code spans kept."""
    spans: Iterator[str] = iter(re.split(r"(`[^`]+`)", " ".join(text.split())))
    return "".join(
        one.replace("|", "\\|") if one.startswith("`") and one.endswith("`") and len(one) > 1 else _plain(one)
        for one in spans
    )


def _plain(text: str) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\*_\[\]|#`{}])", r"\\\1", safe)
