"""docs/tutorial.md, done as it says: its files are saved, its commands run, their answers look like those it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import brokers

pytestmark = pytest.mark.proof(
    "test_snippets.py and surface/test_cli_usage.py: each piece of code and command by itself"
)

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMPT = "crm> "
INSTALLED = (  # by whoever runs this
    "mkdir contacts && cd contacts",
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install 'resilient-engine[testing,dashboard]'",
    ". .venv/bin/activate",
)
STARTED = {"python crm.py": PROMPT, "resilient worker": "started:", "resilient dashboard": "http://127.0.0.1:"}
READS = ("python app.py", "resilient jobs list", "resilient status", "resilient sync status", "resilient resources why")
READS += ("resilient connections list",)
LIMIT = 150  # seconds, on a machine that does much else


class Reader:
    """Somebody at three terminals, in a folder of their own."""

    def __init__(self, folder):
        self.folder, self.port = folder, brokers.free_port()
        self.programs, self.commands, self.answers = {}, [], {}
        (folder / "browser.py").write_text("import sys, urllib.request; urllib.request.urlopen(sys.argv[1]).read()")
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith("RESILIENT_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "BROWSER": f"{sys.executable} {folder}/browser.py %s &",
            "COLUMNS": "200",
        }

    def save(self, block):
        """A file; or what takes the place of a statement of one."""
        name, instead = re.match(r"# (\w+\.py)(?:, instead of: (.+))?\n", block).groups()
        path = self.folder / name
        if instead:
            before, _, after = path.read_text().partition(instead)
            _, _, rest = after.partition("\n)\n")
            block = f"{before}{block}{rest}"
        path.write_text(block.replace("8123", str(self.port)))

    def type(self, block):
        """The commands of a block, each with the answer that stands below it."""
        for prompt, command, answer in re.findall(r"^(\$|crm>) (.+)\n((?:(?!\$ |crm> ).*\n)*)", block, re.MULTILINE):
            self.commands.append(command)
            if prompt == "crm>":
                self.tell_crm(command)
            elif command in STARTED:
                self.start(command)
            elif command not in INSTALLED:
                self.run(command, answer)

    def run(self, command, answer):
        """A command; one that only reads is typed again until it shows what the page shows."""
        if match := re.match(r"export (.*)", command):
            for name, value in re.findall(r"(\w+)=(\$\(.*?\)|\S+)", match[1]):
                self.environment[name] = self.shell(f"echo {value}").strip()
            return
        end = time.monotonic() + LIMIT
        while True:
            output = self.shell(command)
            if shape(answer).search(output):
                self.answers[command] = output
                return
            assert command.startswith(READS), f"{command}\n{output}"
            assert time.monotonic() < end, f"{command}\n{output}\n{self.logs()}"
            time.sleep(0.5)  # as a person would; each look is a process of its own

    def shell(self, command):
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
            timeout=LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def start(self, command):
        """A program that stays; one that runs already is stopped before, by Ctrl-C."""
        self.stop(command)
        log = (self.folder / f"{command.split()[-1]}.log").open("w+")
        typed = f"exec {command}" + (" --port 0" if "dashboard" in command else "")
        self.programs[command] = log, subprocess.Popen(
            ["bash", "-c", typed], cwd=self.folder, env=self.environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.wait_for(log, STARTED[command], 1)

    def tell_crm(self, line):
        log, program = self.programs["python crm.py"]
        times = Path(log.name).read_text().count(PROMPT)
        line = line.replace(" 120", " 3600")  # so that no slow machine sees its end
        program.stdin.write(f"{line}\n")
        program.stdin.flush()
        self.wait_for(log, PROMPT, times + 1)

    def wait_for(self, log, text, times):
        end = time.monotonic() + LIMIT
        while Path(log.name).read_text().count(text) < times:
            assert time.monotonic() < end, f"{text!r} is not in {log.name}\n{self.logs()}"
            time.sleep(0.02)

    def stop(self, command):
        if command in self.programs:
            log, program = self.programs.pop(command)
            program.send_signal(signal.SIGINT)
            try:
                program.wait(LIMIT)
            finally:
                program.kill()
                program.wait()
                program.stdin.close()
                log.close()

    def logs(self):
        return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


def shape(answer):
    """What is the same in every run: the words without digits, in their order; counts of contacts are whole lines."""
    if re.fullmatch(r"(?:hubspot/\w+ \d+\n)+", answer):
        return re.compile(rf"^{re.escape(answer)}$", re.MULTILINE)
    words = [word for word in answer.split() if not re.search(r"\d", word) and len(word) > 3 and word[0] != "/"]
    return re.compile(".*?".join(map(re.escape, words)), re.DOTALL)


@pytest.mark.slow
def test_it_is_done_as_it_says(tmp_path):
    reader = Reader(tmp_path)
    try:
        for language, block in BLOCK.findall(TEXT):
            if language == "python":
                reader.save(block)
            else:
                reader.type(block)
    finally:
        for command in list(reader.programs):
            reader.stop(command)
    assert "1 passed" in reader.answers["pytest -q test_app.py"]
    assert len(reader.commands) >= 35
    assert {path.name for path in tmp_path.glob("*.py")} == {"crm.py", "app.py", "test_app.py", "browser.py"}
    log = (tmp_path / "crm.py.log").read_text()
    assert log.count("acme GET /crm/v3/objects/contacts 429") <= 1


def test_the_shape_of_an_answer_is_seen():
    answer = "ACCOUNT       STATE   SINCE\nhubspot/acme  active  09:38:27 UTC (8 s ago)\n"
    assert shape(answer).search("ACCOUNT STATE SINCE\nhubspot/acme active 10:00:00 UTC (1 min 2 s ago)\n")
    assert not shape(answer).search("ACCOUNT STATE SINCE\nhubspot/acme needs_reauth 10:00:00 UTC (2 s ago)\n")
    assert not shape("hubspot/acme 250\n").search("hubspot/acme 249\n")


def test_what_it_installs_exists():
    extras = re.search(r"\[([\w,]+)\]'$", INSTALLED[2])[1].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
