import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import DraftstoreError
from draftstore.search import ngrams, sorting
from draftstore.sizing import (
    LAWS,
    LOOKUP_TOKENS,
    MAX_SEGMENT_TOKENS,
    PART_ROWS,
    RATES,
    READ,
    SEGMENT_TOKENS,
    Law,
    Site,
    plan,
)
from draftstore.stores.rest import build
from draftstore.text.tokens import token_dtype
from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def figures(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


SCALE = figures("rest_scale.json")["scale"]
BUILDS = [each["build"][cores] for each in SCALE for cores in ("one_core", "all_cores")]


def test_limits_are_those_of_builds() -> None:
    assert SEGMENT_TOKENS == build.SEGMENT_TOKENS
    assert MAX_SEGMENT_TOKENS == sorting.MAX_SEGMENT_TOKENS
    assert PART_ROWS == ngrams.PART_ROWS


@pytest.mark.parametrize("vocabulary", [2, 32_000, 65_535, 65_536, 151_665])
def test_a_token_has_the_bytes_of_its_type(vocabulary: int) -> None:
    assert Site(1e6, vocabulary=vocabulary).token_bytes == token_dtype(vocabulary).itemsize


@pytest.mark.parametrize("built", BUILDS, ids=lambda built: f"{built['tokens']} on {built['workers']}")
def test_bytes_are_those_of_measured_builds(built: dict[str, Any]) -> None:
    site = Site(built["tokens"], segment_tokens=math.ceil(built["entries"] / built["segments"] * 1.02))
    tokenizer = 3e6
    assert plan(site)["bytes"]["rest"] == pytest.approx(built["bytes"], rel=0.01, abs=tokenizer)


@pytest.mark.parametrize("built", BUILDS, ids=lambda built: f"{built['tokens']} on {built['workers']}")
def test_hours_are_those_of_measured_builds(built: dict[str, Any]) -> None:
    segment = math.ceil(built["entries"] / built["segments"] * 1.02)
    site = Site(built["tokens"], cores=built["workers"], segment_tokens=segment)
    hours = plan(site)["hours"]
    assert 3600 * hours["tokenize"] == pytest.approx(built["tokenize_seconds"], rel=0.3)
    built_hours = sum(hours[step] for step in ("tokenize", "sort", "finish"))
    assert 3600 * built_hours == pytest.approx(built["build_seconds"], rel=0.4)


@pytest.mark.parametrize("each", SCALE, ids=lambda each: each["source"])
def test_memory_and_lookups_are_those_that_were_measured(each: dict[str, Any]) -> None:
    entries = each["build"]["one_core"]["entries"]
    planned = plan(Site(each["build"]["one_core"]["tokens"]))
    text = 2 * entries
    assert each["sort_peak_bytes"] <= 1.01 * (planned["memory"]["sort_a_segment"] - text)
    assert planned["memory"]["sort_a_segment"] - text <= 1.1 * each["sort_peak_bytes"]
    measured = each["backoff"]["query_us"]["p50"]
    assert 1e6 * planned["lookup"]["in_memory"] == pytest.approx(measured, rel=0.7)


def test_rates_are_those_of_the_results() -> None:
    largest, smallest = SCALE[-1]["build"]["one_core"], SCALE[0]
    assert RATES["tokenize"].value == pytest.approx(largest["tokenize_tokens_per_second"], rel=0.01)
    assert RATES["sort"].value == pytest.approx(
        min(each["build"]["one_core"]["sort_tokens_per_second"] for each in SCALE), rel=0.01
    )
    assert RATES["sort_memory"].value == pytest.approx(smallest["sort_peak_bytes_per_token"], rel=0.01)
    assert RATES["finish"].value == pytest.approx(largest["bytes"] / largest["other_seconds"], rel=0.01)
    assert RATES["documents"].value == pytest.approx(largest["tokens"] / largest["documents"], rel=0.01)
    counted = figures("crest_build.json")
    rate = counted["tokens"] / counted["counting"]["cpu_seconds"]
    assert RATES["count"].value == pytest.approx(rate, rel=0.01)
    some, everything = grown("chat_0.3"), grown("all")
    assert RATES["lookup"].value * 1e6 == pytest.approx(
        some["lookup"]["backoff"]["query_us"]["p50"], rel=0.01
    )
    rate = everything["tokens"] / everything["crest_50"]["cpu_seconds"]
    assert RATES["distil"].value == pytest.approx(rate, rel=0.01)


def grown(name: str) -> Any:
    """Return what was measured of a sample of benchmarks.growth."""
    (sample,) = (each for each in figures("growth.json")["measured"] if each["name"] == name)
    return sample


def test_a_plan_of_300_million_tokens_is_what_they_took() -> None:
    sample = grown("all")
    built, planned = sample["rest"], plan(Site(sample["tokens"], cores=2, memory=6e9))
    assert planned["segments"] == built["segments"] == 2
    assert built["peak_anonymous"] < planned["memory"]["sort"] < 6e9
    assert planned["bytes"]["rest"] == pytest.approx(built["bytes"], rel=0.01)
    measured = sample["lookup"]["backoff"]["query_us"]["p50"]
    assert 1e6 * planned["lookup"]["in_memory"] == pytest.approx(measured, rel=0.3)


def test_a_plan_of_a_billion_tokens_is_what_they_took() -> None:
    built, drafts = figures("billion.json"), figures("billion.json")["draft_us"]
    planned = plan(Site(built["tokens"] * 0.997, cores=2, memory=24e9))  # that is with the ends of documents
    assert planned["segments"] == built["segments"] == 4
    assert built["peak_anonymous"] < planned["memory"]["sort"]
    assert planned["bytes"]["rest"] == pytest.approx(built["bytes"], rel=0.02)
    assert 1e6 * planned["lookup"]["in_memory"] == pytest.approx(drafts["whole"]["p50"], rel=0.1)
    share = (drafts["whole"]["p50"] - drafts["a partition"]["p50"]) / 3
    assert 1e6 * RATES["lookup_segment"].value == pytest.approx(share, rel=0.05)
    larger = math.log2(built["tokens"] / 4 / LOOKUP_TOKENS)
    doubling = (drafts["a partition"]["p50"] - 1e6 * RATES["lookup"].value) / larger
    assert 1e6 * RATES["lookup_doubling"].value == pytest.approx(doubling, rel=0.05)


def test_reads_of_a_lookup_are_those_that_were_measured() -> None:
    assert RATES["lookup_reads"].value == pytest.approx(
        grown("chat_1")["cold"]["bytes"]["p50"] / READ, rel=0.1
    )


def test_every_source_is_a_file_of_results() -> None:
    for rate in RATES.values():
        name = rate.source.partition(":")[0]
        assert not name.endswith(".json") or (RESULTS / name).exists()


sites = st.builds(
    Site,
    tokens=st.floats(1e3, 1e12),
    machines=st.integers(1, 100),
    cores=st.integers(1, 256),
    memory=st.floats(8e9, 1e13),
    vocabulary=st.integers(2, 300_000),
    disk_bandwidth=st.floats(1e8, 1e11),
)


@given(sites)
def test_more_text_costs_more(site: Site) -> None:
    less, more = plan(site), plan(Site(**{**vars(site), "tokens": 2 * site.tokens}))
    assert more["hours"]["all"] >= less["hours"]["all"] > 0
    assert more["bytes"]["rest"] > 1.9 * less["bytes"]["rest"] - 4 * site.vocabulary * 4
    assert more["lookup"]["with_disk"] >= more["lookup"]["in_memory"] >= less["lookup"]["in_memory"]


@given(sites)
def test_sorting_fits_into_the_memory(site: Site) -> None:
    memory = plan(site)["memory"]
    assert memory["sort"] <= site.memory
    assert 1 <= memory["sorters"] <= site.cores


@given(sites)
def test_faster_machines_need_less_time(site: Site) -> None:
    faster = {name: 2 * RATES[name].value for name in ("tokenize", "sort", "count", "distil", "finish")}
    assert plan(site, faster)["hours"]["all"] <= plan(site)["hours"]["all"]


def test_a_store_in_memory_needs_no_disk() -> None:
    lookup = plan(Site(1e8, memory=64e9))["lookup"]
    assert lookup["share_on_disk"] == 0
    assert lookup["with_disk"] == lookup["in_memory"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": math.nan}, "tokens"),
        ({"machines": 0}, "machines"),
        ({"cores": 0}, "cores"),
        ({"memory": 1}, "memory"),
        ({"vocabulary": 1}, "vocabulary"),
        ({"disk_bandwidth": 0}, "disk_bandwidth"),
        ({"disk_latency": -1}, "disk_latency"),
        ({"segment_tokens": 2**31}, "segment_tokens"),
        ({"added": 1e12}, "added"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(DraftstoreError, match=named):
        plan(Site(**{"tokens": 1e9, **wrong}))


def test_a_segment_that_cannot_be_sorted_names_one_that_can() -> None:
    with pytest.raises(DraftstoreError, match="--segment-tokens") as refused:
        plan(Site(1e11, memory=2e9))
    fitting = int(str(refused.value).split("--segment-tokens ")[1].split()[0])
    plan(Site(1e11, memory=2e9, segment_tokens=fitting))


def test_limits_say_what_to_do() -> None:
    large = plan(Site(1e11, memory=256e9))["limits"]
    assert [
        word for word, said in zip(("CREST", "disk", "--segment-tokens"), large, strict=True) if word in said
    ]
    assert plan(Site(3e8, memory=6e9))["limits"] == []
    few = plan(Site(1e10, memory=256e9, segment_tokens=MAX_SEGMENT_TOKENS))
    assert (few["segments"], few["limits"]) == (5, [])


def test_a_law_is_sure_of_what_it_saw_and_doubts_the_rest() -> None:
    law = Law(0.2, 0.25, 0.1, 0.15, 0.05, 7.0, 2.5, 5, 1e8)
    widths = [most - least for least, _, most in map(law.at, (1e7, 1e9, 1e11))]
    assert widths == sorted(widths)
    assert law.at(1e7)[1] == pytest.approx(0.2 + 0.25 * 7)


def test_laws_are_those_of_the_results() -> None:
    found = RESULTS / "growth.json"
    laws = [law["law"] for law in json.loads(Path(found).read_text(encoding="utf-8"))["laws"]]
    assert all(law._asdict() in laws for law in LAWS.values())
