"""What a Prefect server is told when it, or its only worker, starts: which runs are over, and where to report trouble.

    python -m pipelines.upkeep              sets up the notices
    python -m pipelines.upkeep --cut-off    ends runs that no process is working on any more, too

Notices are automations of Prefect: its page shows them, and can change or switch them off.
"""

import os
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import click
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.states import Cancelled, Crashed

URL_VARIABLE = "DRAFTSTORE_NOTIFY_URL"
"""A webhook that takes `{"text": ...}`, such as those of Slack, Mattermost and Teams; unset: no notices."""
BLOCK = "draftstore"
STUCK_AFTER, LATE_AFTER = timedelta(hours=12), timedelta(hours=1)
AT_WORK = StateType.RUNNING, StateType.PENDING, StateType.CANCELLING
CUT_OFF = "nothing was at work on this run when Prefect started: run it again, finished steps are kept"
RUN = "{{ flow.name }} `{{ flow_run.name }}`"


def _events(*names: str) -> set[str]:
    return {f"prefect.flow-run.{name}" for name in names}


ENDS = _events("Completed", "Failed", "TimedOut", "Crashed", "Cancelled")
NOTICES: dict[str, tuple[str, dict[str, Any]]] = {
    "draftstore: a run failed": (
        RUN + ": {{ flow_run.state.name }}: {{ flow_run.state.message }}",
        {"expect": _events("Failed", "TimedOut", "Crashed"), "posture": Posture.Reactive, "threshold": 1},
    ),
    "draftstore: a run is stuck": (
        RUN + " has been at work for 12 hours",
        {"after": _events("Running"), "expect": ENDS, "posture": Posture.Proactive, "within": STUCK_AFTER},
    ),
    "draftstore: a run does not start": (
        RUN + " should have started an hour ago: is a worker running?",
        {
            "after": _events("Late", "Pending"),  # the latter where a worker took it and was killed
            "expect": ENDS | _events("Running", "AwaitingConcurrencySlot"),
            "posture": Posture.Proactive,
            "within": LATE_AFTER,
        },
    ),
}
"""Text and trigger of the automations, by name."""


@click.command()
@click.option(
    "--cut-off", is_flag=True, help="End runs that no process is working on; no worker may be running."
)
def main(cut_off: bool) -> None:
    """Set up the notices of the server in PREFECT_API_URL."""
    if cut_off:
        for name in end_cut_off():
            click.echo(f"the run {name} had been cut off: it is marked as ended")
    set_notices(os.environ.get(URL_VARIABLE, ""))


def end_cut_off() -> list[str]:
    """Mark all runs that are not waiting as ended; return their names.

    To be called while no worker runs: their processes are gone then.
    """
    asked = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(AT_WORK))))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=asked)
        for run in runs:
            end = Cancelled if run.state_type == StateType.CANCELLING else Crashed
            client.set_flow_run_state(run.id, end(message=CUT_OFF), force=True)
    return [run.name for run in runs]


def set_notices(url: str) -> None:
    """Create or renew the automations that report runs in trouble; remove them if there is nowhere to report to."""
    block = _save_channel(url) if url else None
    with get_client(sync_client=True) as client:
        for name, (text, trigger) in NOTICES.items():
            found = client.read_automations_by_name(name)
            if block is None:
                for old in found:
                    client.delete_automation(old.id)
                continue
            notice = AutomationCore(
                name=name,
                enabled=all(old.enabled for old in found),
                trigger=EventTrigger(
                    match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
                    for_each={"prefect.resource.id"},
                    **trigger,
                ),
                actions=[SendNotification(block_document_id=block, subject=name, body=text)],
            )
            if found:
                client.update_automation(found[0].id, notice)
            else:
                client.create_automation(notice)


def _save_channel(url: str) -> UUID:
    """Save a webhook in the server; return the id under which notices go there."""
    webhook = CustomWebhookNotificationBlock.model_validate(
        {
            "name": BLOCK,
            "url": "{{url}}",
            "secrets": {"url": url},  # such addresses are credentials: the page does not show it
            "json_data": {"text": "{{subject}}\n{{body}}"},
        }
    )
    return cast("UUID", webhook.save(BLOCK, overwrite=True))


if __name__ == "__main__":
    main()
