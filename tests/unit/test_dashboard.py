"""The dashboard and the alerts in deploy/: every metric and label they name is one that `/metrics` gives."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from shown_status import MODELS, request, status_of

from stoker.ipc.request import Priority
from stoker.ipc.status import RequestMove
from stoker.server.metrics.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/stoker.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
ROWS = ["Now", "Latency", "Throughput", "Cache", "Memory", "Devices", "Engine"]


def scraped_labels() -> dict[str, set[str]]:
    """The labels of every sample that a scrape gets, by its name."""
    metrics = Metrics()
    with metrics.request("chat"):
        pass
    ended = request("ended", Priority.INTERACTIVE)
    moves = [RequestMove(at=0.0, state="prefill")]
    metrics.ended.count(msgspec.structs.replace(ended, first_token_s=0.5, end_to_end_s=1.0, moves=moves))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render(status_of(), MODELS).decode()):
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        for ending in endings:
            found.setdefault(family.name + ending, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


LABELS = scraped_labels()


def selectors(node) -> list[promql_parser.VectorSelector]:
    """Every selector of a parsed expression."""
    match node:
        case promql_parser.VectorSelector():
            return [node]
        case promql_parser.MatrixSelector():
            return selectors(node.vector_selector)
        case promql_parser.Call():
            return [found for argument in node.args for found in selectors(argument)]
        case promql_parser.BinaryExpr():
            return selectors(node.lhs) + selectors(node.rhs)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return []
    return selectors(node.expr)  # of an aggregation, brackets, a sign


def grouped_by(node) -> set[str]:
    """Labels that aggregations of a parsed expression group by."""
    match node:
        case promql_parser.AggregateExpr():
            return set(node.modifier.labels if node.modifier else ()) | grouped_by(node.expr)
        case promql_parser.Call():
            return {label for argument in node.args for label in grouped_by(argument)}
        case promql_parser.BinaryExpr():
            return grouped_by(node.lhs) | grouped_by(node.rhs)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            return grouped_by(node.expr)
    return set()


def check(expression: str) -> None:
    """Names and labels of an expression are those of a scrape."""
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    found = selectors(parsed)
    assert found, expression
    labels: set[str] = set()
    for selector in found:
        assert selector.name in LABELS, f"{selector.name} is no metric: {expression}"
        labels |= LABELS[selector.name]
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= LABELS[selector.name] | SCRAPED, f"{selector.name} has not {used}"
    assert grouped_by(parsed) <= labels | SCRAPED, expression


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_shows_metrics_that_exist_and_says_what_and_in_which_unit(panel) -> None:
    """O15: a name that `/metrics` does not give is an empty panel."""
    assert len(panel["description"].split()) > 3
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    for target in panel["targets"]:
        check(target["expr"])


def test_the_dashboard_has_its_rows_and_one_place_for_each_panel() -> None:
    """O15: it is imported as it is, with any data source; no panel lies over another."""
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS
    (source, *_) = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    covered = [
        (place["x"] + across, place["y"] + down)
        for place in places
        for across in range(place["w"])
        for down in range(place["h"])
    ]
    assert len(covered) == len(set(covered))
    assert max(across for across, _ in covered) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for annotation in DASHBOARD["annotations"]["list"]:
        check(annotation["expr"])


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_follows_from_metrics_that_exist(rule) -> None:
    """O15: an alert over a name that does not exist never fires."""
    check(rule["expr"])
    assert rule["annotations"]["summary"]


def test_a_wrong_name_or_label_is_found() -> None:
    """O15: the check itself sees what is wrong."""
    with pytest.raises(AssertionError, match="no metric"):
        check("sum(rate(stoker:steps[5m]))")
    with pytest.raises(AssertionError, match="has not"):
        check('stoker:models{stat="ready"}')
    with pytest.raises(AssertionError):
        check("sum by (modell) (stoker:model_leases)")
