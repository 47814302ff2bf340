"""docs/sampling.md names the samplers that there are, with their defaults."""

import re

from blocks import ROOT

from stoker.ipc.request import Sampling

ROW = re.compile(r"^\| [\d to]+ \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)


def test_the_page_names_every_field_of_a_sampling_and_its_default():
    """A sampler that is added stands on the page, one that is claimed exists."""
    rows = ROW.findall((ROOT / "docs" / "sampling.md").read_text(encoding="utf-8"))
    shown = {}
    for fields, defaults in rows:
        names = re.findall(r"`(\w+)`", fields)
        values = [re.sub(r" \(.*\)", "", each) for each in defaults.split(", ")]
        shown |= dict(zip(names, values, strict=False))
    real = Sampling()
    assert set(shown) == set(Sampling.__struct_fields__)
    wordy = {"logit_bias", "dry_sequence_breakers", "seed"}
    assert {name: value for name, value in shown.items() if name not in wordy} == {
        name: str(getattr(real, name)) for name in Sampling.__struct_fields__ if name not in wordy
    }
