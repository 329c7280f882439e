"""One answer in decoding: what its forward passes bring becomes text, and goes to the client."""

from collections.abc import Sequence
from time import monotonic

from draftstore.decoding.loop import Step
from draftstore.hf.requests import Likelihood
from services.worker.jobs import Answered, DecodingJob, Delta
from services.worker.work import Engine
from services.worker.writing import Scored, Writing


class UnwantedError(Exception):
    """Ends the decoding of a cancelled request."""


class Answering:
    """One answer to a request in decoding; see `services.worker.work.Answer`.

    Attributes:
        job: the request.
        number: number of the answer.
        request: what to generate.
        begun: start of its decoding, in monotonic seconds.
        writing: its text.
    """

    def __init__(self, job: DecodingJob, engine: Engine) -> None:
        """Begin the next answer to a request."""
        self.job, self.number, self.request = job, job.begun, job.requests[job.begun]
        self.begun = monotonic()
        if job.waited is None:
            job.waited = self.begun - job.created
        if not self.number or self.request.prompt is not job.requests[self.number - 1].prompt:
            job.usage.prompt_tokens += len(self.request.prompt)
        job.begun += 1
        self.writing = Writing(
            self.request,
            engine.facts,
            engine.tokenizer,
            self._show,
            job.usage,
            stops=job.stops,
            lead=job.lead,
        )

    def _show(self, text: str, scored: Sequence[Scored]) -> None:
        self.job.post(Delta(self.number, text, scored))

    def take(self, step: Step, likelihoods: Sequence[Likelihood]) -> None:
        """Write what a pass has brought.

        Raises:
            UnwantedError: the request was cancelled.
            EndedError: the answer ends here.
        """
        if self.job.cancelled:
            raise UnwantedError
        self.writing.take(step, likelihoods)
        if self.job.first is None and self.writing.first_token is not None:
            self.job.first = self.writing.first_token - self.job.created

    def finish(self) -> Answered:
        """Return the complete answer."""
        self.writing.finish()
        if self.writing.reason == "length":
            self.job.reason = "length"
        return Answered(self.number, self.writing.text, self.writing.reason, self.writing.scored)
