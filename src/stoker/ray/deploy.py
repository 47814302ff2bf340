"""A site on a cluster of Ray: deployed, updated, looked at and deleted.

Owns what Ray Serve is told of the two deployments; what they do is `replica`'s and `door`'s. `build` is what
the configuration file of `serve deploy` names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import ray
import yaml
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.ray.door import Door, ProxiedDoor
from stoker.ray.replica import StokerReplica
from stoker.ray.site import Ingress, RaySite, digest_of, site_of
from stoker.server.serve import bind

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview

log = logging.getLogger(__name__)

REPLICA, DOOR = "StokerReplica", "Door"
BUILDER = "stoker.ray.deploy:build"
ROUTER = "stoker.ray.serve_router:NamedReplicaRouter"
POLICY = "stoker.ray.autoscaling:InteractivePolicy"
MAX_ONGOING = 100_000
"""Requests that Serve gives a replica or a door at once: the order and the bound of the line are Stoker's."""
LOGGING: dict[str, Any] = {"enable_access_log": False}
"""Serve would write a line for each call between a door and a replica; requests are in Stoker's own log."""
CONTROLLER = {"runtime_env": {"env_vars": {"RAY_SERVE_PROXY_USE_GRPC": "1"}}}
"""Options of Serve's controller, whose environment Ray's proxies have: they call a door over gRPC too, as
`stoker.ray.calls` does. Obeyed where this is the first site of the cluster's Serve, for all applications."""
ACTOR_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Of doors and replicas: what is ours runs on Ray's own event loop there, as it is asyncio's alone. Else each
message changes threads twice in each process, on cores that compute."""
TELL_S = 2.0
"""How often a replica tells the controller what it has to do; Serve's own is 10 s."""
LOOK_BACK_S = 10.0
"""Of the figures that the policy reads the newest of; a fifth of it is how often they are taken."""
MAX_STARTS = 3
"""Of a replica in a row, before the deployment has failed: a missing model does not come by itself."""
REACH_S = 5.0
"""In which the head of a cluster takes a connection."""
POLL_S = 0.5
ANSWER_S = 10.0
"""In which the door answers at the address of the site once everything runs."""
CLOSE_S = 10.0
"""What a door of its own port has beside `stop_s` and `drain_s`: to tell what is cut short, and to close."""
_OWN_ERROR = re.compile(r"^stoker\.errors\.\w+: (.+)$", re.MULTILINE)
_FAILED = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})
_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - where a server of any address is asked from here

Tell = Callable[[str], None]


# ---------------------------------------------------------------- what is deployed


def build(args: Mapping[str, Any]) -> Application:
    """The application of a site.

    Args:
        args: what `RaySite.as_args` gives.

    Raises:
        InvalidRequestError: a setting is wrong.
    """
    site = site_of(args)
    models = site.replica_engine().model_dump(mode="json", exclude_unset=True)
    server = site.server.model_dump(mode="json", exclude_unset=True)
    replicas = _deployment(
        StokerReplica,
        digest_of(models),
        name=REPLICA,
        ray_actor_options=_actor(site.ray.cpus, site.ray.gpus, site.ray.resources),
        max_surge_percent=site.ray.surge_percent,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),  # type: ignore[arg-type] # a path too
        graceful_shutdown_timeout_s=site.ray.stop_s,
        **_number(site),
    )
    engine = site.door_engine().model_dump(mode="json", exclude_unset=True)
    told = replicas.bind(models), engine, server
    app: Application = _doors(site, digest_of(engine, server, _is_own(site)), told)
    return app


def _is_own(site: RaySite) -> bool:
    """Whether each door listens by itself."""
    return site.ray.ingress is Ingress.DOOR


def _doors(site: RaySite, digest: str, told: tuple[Any, ...]) -> Any:
    """The deployment of the doors, bound to what each is told."""
    table = site.ray
    common = {"name": DOOR, "num_replicas": table.doors, "ray_actor_options": _actor(table.door_cpus)}
    if not _is_own(site):
        doors = _deployment(
            serve.ingress()(ProxiedDoor), digest, graceful_shutdown_timeout_s=table.stop_s, **common
        )
        return doors.bind(*told)
    # where a new door has room beside the old one, some door always listens
    surge = 100 if _available("CPU") >= table.door_cpus else 0
    limit_s = table.stop_s + site.engine.drain_s + CLOSE_S
    doors = _deployment(Door, digest, max_surge_percent=surge, graceful_shutdown_timeout_s=limit_s, **common)
    return doors.bind(*told, table.stop_s)


def _available(resource: str) -> float:
    """How much of it nobody has reserved; 0 where no cluster is connected to."""
    found: dict[str, float] = ray.available_resources() if ray.is_initialized() else {}  # type: ignore[no-untyped-call] # Ray's
    return found.get(resource, 0.0)


def _deployment(kind: type[Any], digest: str, **options: Any) -> Any:
    """A deployment whose replicas stay where the digest is the one that they were started with."""
    deployment: Any = serve.deployment(kind)
    deployment = deployment.options(
        max_ongoing_requests=MAX_ONGOING,
        max_constructor_retry_count=MAX_STARTS,
        graceful_shutdown_wait_loop_s=POLL_S,
        logging_config=LOGGING,
        **options,
    )
    return deployment.options(version=digest, _internal=True)  # else `serve.run` replaces what is equal too


def _actor(cpus: float, gpus: float = 0, resources: Mapping[str, float] | None = None) -> dict[str, Any]:
    job = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    environment = ACTOR_ENVIRONMENT | job.get("env_vars", {})
    return {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "resources": dict(resources or {}),
        "runtime_env": job | {"env_vars": environment},  # else Ray leaves the job's out
    }


def _number(site: RaySite) -> dict[str, Any]:
    """How many replicas there are: always as many, or as the policy says."""
    table = site.ray
    if table.most_replicas == table.min_replicas:
        return {"num_replicas": table.min_replicas}
    rule = {
        "load": table.scale_load,
        "wait_s": table.scale_wait_s,
        "for_background": table.scale_for_background,
    }
    with warnings.catch_warnings(action="ignore"):  # the first is deprecated, and the only one that is obeyed
        scaling = AutoscalingConfig(
            metrics_interval_s=TELL_S,
            min_replicas=table.min_replicas,
            max_replicas=table.most_replicas,
            upscale_delay_s=table.scale_out_after_s,
            downscale_delay_s=table.scale_in_after_s,
            look_back_period_s=LOOK_BACK_S,
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=rule),  # type: ignore[no-untyped-call] # Ray's
        )
    return {"autoscaling_config": scaling}


def serve_config(site: RaySite) -> str:
    """The site as a configuration of Ray Serve, for `serve deploy`, in YAML."""
    config = {
        "proxy_location": _proxies(site),
        "logging_config": LOGGING,
        "controller_options": CONTROLLER,
        "http_options": {"host": site.server.host, "port": site.server.port},
        "applications": [
            {
                "name": site.ray.name,
                "route_prefix": _route(site),
                "import_path": BUILDER,
                "args": site.as_args(),
            }
        ],
    }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def _proxies(site: RaySite) -> str:
    """Where Serve is to have proxies, if this site is the first."""
    return "Disabled" if _is_own(site) else "EveryNode"


def _route(site: RaySite) -> str | None:
    """What proxies bring to the site."""
    return None if _is_own(site) else "/"


# ---------------------------------------------------------------- the cluster


@contextlib.contextmanager
def cluster(address: str | None, tell: Tell | None) -> Iterator[bool]:
    """A connection to the cluster; one may be started where none runs here and none is named.

    Args:
        address: of its head; None: `RAY_ADDRESS`, then the one of this machine.
        tell: gets a line for people when one is started; None: none is.

    Yields:
        Whether the cluster ends with this program.

    Raises:
        MachineSetupError: it does not answer, or none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # its lines are ours in other words
    how: dict[str, Any] = {"namespace": "serve", "log_to_driver": False, "logging_level": logging.ERROR}
    is_own = False
    named = address or os.environ.get("RAY_ADDRESS")
    _check_reachable(named)
    try:
        ray.init(address=named or "auto", **how)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if not named and tell is None:
            text = "no cluster of Ray runs on this machine; --address HOST:PORT names one elsewhere"
            raise MachineSetupError(text, param="address") from None
        if named or tell is None:
            text = (
                f"no cluster of Ray lets this machine in at {named}: {error}; one that asks for a token needs"
                " RAY_AUTH_MODE=token here, one of another release of Ray that release"
            )
            raise MachineSetupError(" ".join(text.split()), param="address") from None
        tell("no cluster of Ray runs here: one is started for as long as this command runs")
        ray.init(address="local", include_dashboard=False, **how)
        is_own = True
    try:
        yield is_own
    finally:
        if is_own:
            serve.shutdown()  # type: ignore[no-untyped-call] # Ray's
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raises MachineSetupError: nothing listens there. Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not (colon and port.isdigit() and "/" not in host):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        text = f"no cluster of Ray answers at {address}: {error.strerror or error}"
        raise MachineSetupError(text, param="address") from None


def missing_resources(site: RaySite) -> str:
    """What the cluster has too little of for what is always there, for people; empty: nothing."""
    has = ray.cluster_resources()  # type: ignore[no-untyped-call] # Ray's
    num, table = site.ray.min_replicas, site.ray
    needs = {"CPU": num * table.cpus + table.doors * table.door_cpus, "GPU": num * table.gpus}
    needs |= {name: num * amount for name, amount in table.resources.items()}
    short = [
        f"{need:g} {name} of {has.get(name, 0):g}" for name, need in needs.items() if need > has.get(name, 0)
    ]
    return (
        f"the cluster is too small now: the site needs {', '.join(short)}; replicas wait until there are"
        if short
        else ""
    )


# ---------------------------------------------------------------- what a command does


def deploy(site: RaySite, tell: Tell) -> str:
    """Deploy a site, or bring the one of its name to what the file says; returns when it serves.

    Replicas whose settings changed are replaced one after another, and hand what they have over.

    Args:
        site: what is to be there.
        tell: gets lines for people on what happens.

    Returns:
        The URL.

    Raises:
        MachineSetupError: a replica or a door does not start, or something else answers at the address.
    """
    server = site.server
    if server.second_port is not None or not server.port:
        name, value = ("port", server.port) if not server.port else ("ollama_port", server.second_port)
        text = f"{name}: {value} is nothing for a site, whose doors answer at one port that is known"
        raise InvalidRequestError(text, param=name)
    url = f"http://{_ANY.get(server.host, server.host)}:{server.port}"
    if site.ray.ingress is Ingress.AUTO:
        site = site.with_ingress(_fitting_ingress(url))
    _check_ingress(site, url)
    app = build(site.as_args())
    if short := missing_resources(site):
        tell(short)
    with _failing("Ray Serve does not start"):
        serve.start(
            proxy_location=_proxies(site),
            http_options={"host": server.host, "port": server.port},
            logging_config=LOGGING,
            controller_options=CONTROLLER,
        )
        serve.run_many(
            [serve.RunTarget(app, name=site.ray.name, route_prefix=_route(site))],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    _wait(site.ray.name, tell)
    _check_answer(url)
    return url


def _fitting_ingress(url: str) -> Ingress:
    """How HTTP is to come to doors at that URL: by themselves where the cluster is one machine.

    Through Ray's proxies where these listen there already; Serve that runs without any can be given none.
    """
    status = serve.status()
    if status.applications and not status.proxies:
        return Ingress.DOOR
    num_machines = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call] # Ray's
    if num_machines > 1 or (status.proxies and _is_answered_by_proxy(url)):
        return Ingress.PROXY
    return Ingress.DOOR


def _check_ingress(site: RaySite, url: str) -> None:
    """Refuse what would not answer, or would share what comes with others.

    Raises:
        MachineSetupError: other programs, sites or Ray's proxies listen where doors are to; there are no
            proxies to be had.
    """
    host, port = site.server.host, site.server.port
    if not _is_own(site):
        status = serve.status()
        if status.applications and not status.proxies:
            text = "ray.ingress: Ray Serve runs without proxies; `serve shutdown` ends it, with all its sites"
            raise MachineSetupError(text, param="ray.ingress")
        return
    if _is_answered_by_proxy(url):
        text = f"Ray's proxies listen at port {port}; choose another, or end them with `serve shutdown`"
        raise MachineSetupError(text, param="port", port=port)
    is_update = site_status(site.ray.name) is not None
    bind(host, port, is_shared=is_update, flag="`port` in the file").close()


def _is_answered_by_proxy(url: str) -> bool:
    """Whether a proxy of Ray listens there: of a site's door no such path is known."""
    try:
        return httpx.get(f"{url}/-/healthz", timeout=ANSWER_S).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _failing(text: str) -> Iterator[None]:
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError, ValueError, TimeoutError) as error:
        raise MachineSetupError(f"{text}: {error}", param="ray") from None


def _wait(name: str, tell: Tell) -> None:
    """Tell how far the deployment is until it serves. Raises MachineSetupError: it fails."""
    told = ""
    while True:
        one = site_status(name)
        if one is not None:
            line = "; ".join(f"{each.name}: {each.text}" for each in one.parts)
            if line != told:
                tell(line)
                told = line
            if one.state in _FAILED:
                why = "; ".join(filter(None, [one.message, *(part.message for part in one.parts)]))
                raise MachineSetupError(f"the site {name} is {one.state.lower()}: {reason(why)}", param="ray")
            if one.state == "RUNNING":
                return
        time.sleep(POLL_S)


def reason(message: str) -> str:
    """Why a deployment has failed, of what Ray says of it: our own error, without the stack around it."""
    found = _OWN_ERROR.findall(message)
    return str(found[-1]) if found else message


def _check_answer(url: str) -> None:
    """Raises MachineSetupError: a site does not answer there."""
    ends_s = time.monotonic() + ANSWER_S
    while True:
        try:
            answer = httpx.get(f"{url}/health", timeout=ANSWER_S)
            if answer.status_code == httpx.codes.OK:
                return
            found = f"it answers {answer.status_code}"
        except httpx.HTTPError as error:
            found = str(error)
        if time.monotonic() > ends_s:
            text = (
                f"the site runs, and does not answer at {url} ({found}): Ray Serve was started before without"
                " proxies, or with another host or port, which `serve shutdown` ends"
            )
            raise MachineSetupError(text, param="port")
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One deployment of a site.

    Attributes:
        name: `StokerReplica` or `Door`.
        state: as Ray Serve calls it, such as HEALTHY or UPSCALING.
        replicas: how many there are, by their state.
        message: why it is not well; empty: nothing is said.
    """

    name: str
    state: str
    replicas: dict[str, int]
    message: str

    @property
    def text(self) -> str:
        """Its replicas by state, for people."""
        return (
            ", ".join(f"{num} {state.lower()}" for state, num in self.replicas.items() if num) or "none yet"
        )


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """A site on the cluster.

    Attributes:
        name: of the application.
        state: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED or DELETING.
        message: why it does not run; empty: nothing is said.
        parts: its deployments, the replicas first.
    """

    name: str
    state: str
    message: str
    parts: list[PartStatus]


def site_status(name: str) -> SiteStatus | None:
    """How a site is; None: the cluster has none of that name."""
    return next((one for one in site_statuses() if one.name == name), None)


def site_statuses() -> list[SiteStatus]:
    """Every site of the cluster, by name; other applications of Ray Serve are not told."""
    found = serve.status().applications
    return [_status(name, found[name]) for name in sorted(found) if _is_site(found[name])]


def _is_site(app: ApplicationStatusOverview) -> bool:
    return not app.deployments or {REPLICA, DOOR} <= app.deployments.keys()


def _status(name: str, app: ApplicationStatusOverview) -> SiteStatus:
    parts = [
        PartStatus(
            name=part,
            state=_word(app.deployments[part].status),
            replicas={_word(state): num for state, num in app.deployments[part].replica_states.items()},
            message=app.deployments[part].message,
        )
        for part in (REPLICA, DOOR)
        if part in app.deployments
    ]
    return SiteStatus(name, _word(app.status), app.message, parts)


def _word(state: str) -> str:
    """A state of Ray Serve's, which may be an enum of texts, as a text."""
    return str.__str__(state)


def delete(name: str) -> bool:
    """Take a site off the cluster, and return when it is gone.

    Returns:
        Whether there was one.
    """
    if site_status(name) is None:
        return False
    serve.delete(name)
    return True
