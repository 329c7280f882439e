"""Agents against a model: forced calls, and random requests over both APIs, with drafts and without."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

from draftstore.assembly.sources import Sources
from draftstore.hf.loading import ModelOptions
from draftstore.hf.planning import Effort
from draftstore.text.tokenizer import TextTokenizer
from services.worker.settings import WorkerSettings
from tests.fakes.workers import CHAT, Worker, running_worker

pytest.importorskip("torch")
agents = pytest.importorskip("agents", reason="the package openai-agents is not installed")
openai = pytest.importorskip("openai")

City: TypeAlias = Literal["Rome", "Oslo", "Lima"]
Days: TypeAlias = Literal[1, 2, 3]
REQUESTS = 24


@pytest.fixture(scope="module")
def worker(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Return a worker of a random model without a chat template."""
    from services.worker.model import load_engine
    from tests.fakes.hf_models import save_tiny

    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny(folder, small_tokenizer)
    options = ModelOptions(model=str(folder), dtype="float64", device="cpu")
    engine = load_engine(options, Sources(), Effort(budget=12, fixed=True), WorkerSettings(name="model"))
    with running_worker(engine, max_tokens=200) as worker:
        yield worker


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_an_agent_makes_the_same_calls_in_fewer_passes(worker: Worker, api: str) -> None:
    (calls, passes), (expected, slow) = (_agent_run(worker, api, extra) for extra in ({}, {"budget": 0}))
    assert calls == expected
    assert len(calls) == 3
    assert passes < slow / 2


def _agent_run(worker: Worker, api: str, drafts: dict[str, int]) -> tuple[list[Any], float]:
    """Return the three calls of an agent that must call tools, and the passes that they took."""
    calls = list[Any]()

    @agents.function_tool
    def weather(city: City, days: Days) -> str:
        """Return the weather of a city for some days."""
        calls.append(("weather", city, days))
        return f"sunny in {city}"

    @agents.function_tool
    def book(city: City) -> str:
        """Book a hotel in a city."""
        calls.append(("book", city))
        return "booked"

    async def run() -> None:
        base = "http://{}:{}/v1".format(*worker.address)
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            agent = agents.Agent(
                name="trip", instructions="Plan trips.", tools=[weather, book], reset_tool_choice=False,
                model=kind(model="model", openai_client=client),
                tool_use_behavior=lambda _context, _results: agents.ToolsToFinalOutputResult(
                    is_final_output=len(calls) == 3, final_output="planned"
                ),
                model_settings=agents.ModelSettings(
                    temperature=0, tool_choice="required", parallel_tool_calls=False, extra_body={"draftstore": drafts}
                ),
            )  # fmt: skip
            result = await agents.Runner.run(agent, "Three days in Rome", run_config=quiet)
            assert result.final_output == "planned"

    quiet = agents.RunConfig(tracing_disabled=True)
    before = worker.metric("passes_total")
    asyncio.run(run())
    return calls, worker.metric("passes_total") - before


def test_random_requests_over_both_apis_do_not_change_with_drafts(worker: Worker) -> None:
    salad = random.Random(0)
    forms = set()
    for number in range(REQUESTS):
        api, asked = _request(salad, number)
        replies = []
        for drafts in ({}, {"budget": 0}):
            status, reply = worker.ask(api, **asked, draftstore=drafts)
            assert status == 200, reply
            replies.append(reply)
        found, expected = (_said(api, reply) for reply in replies)
        assert found == expected, asked
        forms.add((api, bool(found[1])))
    assert len(forms) == 4, "answers with calls and without, over both"


def _request(salad: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    function = {
        "name": "f",
        "description": "a function",
        "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]},
    }
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    asked: dict[str, Any] = {"temperature": salad.choice([0, 1]), "seed": number}
    choice = salad.choice(["required", "named", "none", "auto", None])
    wants_json = salad.random() < 0.4
    asked |= {"parallel_tool_calls": salad.choice([True, False])}
    if number % 2:
        asked |= {"input": "Hi", "max_output_tokens": 60, "tools": [{"type": "function", **function}]}
        asked["tool_choice"] = {"type": "function", "name": "f"} if choice == "named" else choice
        if wants_json:
            asked["text"] = {"format": {"type": "json_schema", "name": "c", "schema": schema}}
        return "responses", asked
    asked |= {"messages": CHAT, "max_tokens": 60, "tools": [{"type": "function", "function": function}]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "f"}} if choice == "named" else choice
    if wants_json:
        asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return "chat", asked


def _said(api: str, reply: dict[str, Any]) -> tuple[str, list[Any], Any]:
    """Return text, calls and the end of an answer."""
    if api == "chat":
        message = reply["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        return message["content"] or "", calls, reply["choices"][0]["finish_reason"]
    texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
    items = [item for item in reply["output"] if item["type"] == "function_call"]
    return "".join(texts), [(item["name"], item["arguments"]) for item in items], reply["status"]
