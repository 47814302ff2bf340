"""`stoker ray` without a cluster: what is refused, what Ray Serve is told, and what needs the extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.ray.site import RaySettings, read_site, site_of

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
slots = 2
[models.a]
file = "fake:"
[keys.phone]
hash = "sha256:1cd107c90e2d8f5c1ba31a3c2b7f0c05e5dbe1cf2f3a1e1f0e1d3c5ea9cf35c0"
[ray]
max_replicas = 3
gpus = 0.5
resources = { rack = 1 }
"""
TOLD = """\
import json, sys
from typer.testing import CliRunner
from stoker.cli.app import app
from stoker.ray.deploy import build
file, *sites = json.loads(sys.argv[1])
versions = []
for args in sites:
    door = build(args)._bound_deployment
    replica = door.init_args[0]._bound_deployment
    scaling = replica._deployment_config.autoscaling_config
    versions.append({
        "replica": replica.version, "door": door.version, "num": replica.num_replicas,
        "most": scaling and scaling.max_replicas, "rule": scaling and scaling.policy.policy_kwargs,
        "actor": replica.ray_actor_options, "engine": door.init_args[1],
    })
nowhere = CliRunner().invoke(app, ["ray", "status", "--address", "127.0.0.1:1"])
config = CliRunner().invoke(app, ["ray", "config", file])
print(json.dumps([versions, config.stdout, nowhere.exit_code, nowhere.stderr]))
"""
"""A program of its own: what Ray warns of at its import is an error in a test."""
INGRESS = """\
import dataclasses, json, sys
import httpx, ray
from types import SimpleNamespace
from ray import serve
from stoker.ray import deploy
from stoker.ray.site import Ingress, site_of
found = {}
args, cases = json.loads(sys.argv[1])
for name, (machines, proxies, apps, answers) in cases.items():
    ray.nodes = lambda: [{"Alive": True}] * machines + [{"Alive": False}]
    serve.status = lambda: SimpleNamespace(proxies=proxies, applications=apps)
    def get(url, **_how):
        assert url == "http://127.0.0.1:8686/-/healthz"
        if not answers:
            raise httpx.ConnectError("refused")
        return httpx.Response(answers)
    deploy.httpx.get = get
    found[name] = deploy._fitting_ingress("http://127.0.0.1:8686").value
site = site_of(args)

def refused(ingress, proxies, apps, answers):
    serve.status = lambda: SimpleNamespace(proxies=proxies, applications=apps)
    deploy.httpx.get = lambda url, **_how: httpx.Response(answers)
    deploy.site_status = apps.get
    try:
        deploy._check_ingress(taken.with_ingress(ingress), "http://127.0.0.1:8686")
    except deploy.MachineSetupError as error:
        return error.message

with deploy.bind("127.0.0.1", 0, is_shared=True) as listener:  # a door of some site
    taken = dataclasses.replace(site, server=site.server.replace(port=listener.getsockname()[1]))
    found["refused"] = [
        refused(Ingress.DOOR, {}, {}, 404), refused(Ingress.DOOR, {}, {"stoker": 1}, 404),
        refused(Ingress.DOOR, {"n": 1}, {"stoker": 1}, 200), refused(Ingress.PROXY, {}, {"stoker": 1}, 404),
        refused(Ingress.PROXY, {"n": 1}, {"stoker": 1}, 404), refused(Ingress.PROXY, {}, {}, 404),
    ]
found["reason"] = [deploy.reason(text) for text in (
    "Door: it failed. Error:\\n  File x\\nstoker.errors.MachineSetupError: port 1 is in use", "no such thing"
)]
for ingress in (Ingress.DOOR, Ingress.PROXY, Ingress.AUTO):
    own = site.with_ingress(ingress)
    door = deploy.build(own.as_args())._bound_deployment
    found[f"built {ingress}"] = {
        "stop_s": door.init_args[3:], "limit_s": door._deployment_config.graceful_shutdown_timeout_s,
        "surge": door._deployment_config.max_surge_percent, "version": door.version,
    }
    found[f"config {ingress}"] = deploy.serve_config(own)
print(json.dumps(found))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A right one."""
    path = tmp_path / "site.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_without_the_extra_the_error_says_what_to_install(monkeypatch, file: Path) -> None:
    """P32: in each command; a wrong file is told before."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "stoker.ray.deploy", raising=False)
    for words in (["deploy", str(file)], ["config", str(file)], ["status"], ["delete"]):
        told = CliRunner().invoke(app, ["ray", *words])
        assert told.exit_code == 2
        assert told.stderr == 'stoker: Ray Serve is not installed here: pip install "stoker[ray]"\n'
    file.write_text(FILE + "cpuz = 1\ngpuz = 1\n", encoding="utf-8")
    told = CliRunner().invoke(app, ["ray", "deploy", str(file)])
    assert told.exit_code == 2
    assert f"{file}:10: ray.cpuz: there is no such setting; did you mean cpus?; 1 more:" in told.stderr


@pytest.mark.parametrize("words", [[], ["deploy"], ["config"], ["status"], ["delete"]])
def test_help_fits_a_terminal(words: list[str]) -> None:
    """P32: 80 columns."""
    told = CliRunner().invoke(app, ["ray", *words, "--help"], env={"COLUMNS": "80"}).output
    assert "Examples:" in told
    assert all(len(line) <= 80 for line in told.splitlines())


@pytest.mark.long
def test_ray_serve_is_told_the_site_and_what_is_equal_keeps_its_version(file: Path) -> None:
    """P32, P33, P42: a change of the engine replaces replicas, of the server doors, of numbers nothing."""
    site = read_site(file)
    args = site.as_args()
    changed = [
        args | {"engine": args["engine"] | {"slots": 3}},
        args | {"server": args["server"] | {"strict": True}},
        args | {"ray": args["ray"] | {"max_replicas": 1}},
    ]
    given = json.dumps([str(file), args, args, *changed])
    done = subprocess.run(
        [sys.executable, "-c", TOLD, given], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (first, again, models, door, numbers), told, exit_code, nowhere = json.loads(done.stdout)
    assert again == first
    assert (models["replica"] == first["replica"], models["door"] == first["door"]) == (False, True)
    assert (door["replica"] == first["replica"], door["door"] == first["door"]) == (True, False)
    assert (numbers["replica"], numbers["door"]) == (first["replica"], first["door"])
    assert (first["most"], numbers["most"], numbers["num"]) == (3, None, 1)
    assert first["rule"] == {"load": 0.8, "wait_s": 5.0, "for_background": False}
    names = ("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP")
    assert first["actor"].pop("runtime_env") == {"env_vars": dict.fromkeys(names, "0")}
    assert first["actor"] == {"num_cpus": 1.0, "num_gpus": 0.5, "resources": {"rack": 1.0}}
    assert first["engine"] == {}

    config = yaml.safe_load(told)
    (application,) = config["applications"]
    assert application["import_path"] == "stoker.ray.deploy:build"
    assert site_of(application["args"]) == site
    assert config["controller_options"]["runtime_env"]["env_vars"] == {"RAY_SERVE_PROXY_USE_GRPC": "1"}
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8686}

    refused = "stoker: no cluster of Ray answers at 127.0.0.1:1: Connection refused\n"
    assert (exit_code, nowhere) == (2, refused), "Ray itself tries for minutes"


CASES = {  # machines, proxies, other sites, what is answered at /-/healthz; how doors are reached then
    "one machine": (1, {}, {}, 0, "door"),
    "one machine, redeployed": (1, {}, {"stoker": 1}, 404, "door"),
    "two machines": (2, {}, {}, 0, "proxy"),
    "a proxy has the port": (1, {"n": 1}, {"stoker": 1}, 200, "proxy"),
    "proxies at another port": (1, {"n": 1}, {"other": 1}, 0, "door"),
    "proxies and two machines": (2, {"n": 1}, {"other": 1}, 0, "proxy"),
    "two machines, Serve without proxies": (2, {}, {"stoker": 1}, 404, "door"),
}


@pytest.mark.long
def test_doors_listen_by_themselves_where_the_cluster_is_one_machine(file: Path) -> None:
    """P43: and go through Ray's proxies where there are more, or where those have the port."""
    args = read_site(file).as_args()
    given = json.dumps([args, {name: case[:4] for name, case in CASES.items()}])
    done = subprocess.run(
        [sys.executable, "-c", INGRESS, given], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in CASES} == {name: case[4] for name, case in CASES.items()}
    assert found["reason"] == ["port 1 is in use", "no such thing"]
    in_use, by_proxies, no_proxies = (
        "is in use; stop the other program",
        "Ray's proxies listen",
        "without proxies",
    )
    for told, says in zip(found["refused"], [in_use, None, by_proxies, no_proxies, None, None], strict=True):
        assert (told is None) if says is None else says in told
    assert "choose another port with `port` in the file" in found["refused"][0]
    own, proxied = found["built door"], found["built proxy"]
    assert (own["stop_s"], own["limit_s"]) == ([600.0], 600.0 + 10.0 + 10.0), "stop_s, drain_s and to close"
    assert (proxied["stop_s"], proxied["limit_s"], proxied["surge"]) == ([], 600.0, 0)
    assert own["surge"] == 0, "no cluster says that there is room"
    assert found["built auto"] == proxied, "`serve deploy` asks nothing of a cluster"
    assert own["version"] != proxied["version"]
    config = yaml.safe_load(found["config door"])
    assert (config["proxy_location"], config["applications"][0]["route_prefix"]) == ("Disabled", None)
    config = yaml.safe_load(found["config auto"])
    assert (config["proxy_location"], config["applications"][0]["route_prefix"]) == ("EveryNode", "/")


def test_the_page_names_every_key_of_the_table() -> None:
    """P30: with its default."""
    page = (ROOT / "docs" / "howto" / "ray.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    missing = [name for name in RaySettings.model_fields if f"`{name}`" not in table]
    assert missing == []
