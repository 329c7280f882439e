"""Drafts for many texts in one step: one call for all drafts from the same store.

    trees = propose_many(sessions, budgets, min_probs)       as `propose` of each session, in fewer calls

The overhead of a call exceeds the cost of most drafts: a lookup service gets one request for all texts.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from draftstore.drafting.contexts import ContextSession, propose_batch
from draftstore.drafting.drafter import Session
from draftstore.drafting.mixture import MixtureSession
from draftstore.trees.tree import DraftTree


def propose_many(
    sessions: Sequence[Session], budgets: Sequence[int], min_probs: Sequence[float]
) -> list[DraftTree]:
    """Return the proposals of sessions of one or several drafters; a budget of 0 skips a session."""
    trees = [DraftTree.empty()] * len(sessions)
    groups: dict[Hashable, list[int]] = {}
    mixed: list[int] = []
    for place, session in enumerate(sessions):
        if isinstance(session, MixtureSession):
            mixed.append(place)
        elif budgets[place] > 0:
            groups.setdefault((_source_of(session), budgets[place], min_probs[place]), []).append(place)
    for places in groups.values():
        group = [sessions[place] for place in places]
        found = _propose_together(group, budgets[places[0]], min_probs[places[0]])
        for place, tree in zip(places, found, strict=True):
            trees[place] = tree
    mixtures: list[Any] = [sessions[place] for place in mixed]
    parts = _propose_parts(mixtures, [budgets[place] for place in mixed]) if mixed else []
    for place, mixture, proposed in zip(mixed, mixtures, parts, strict=True):
        trees[place] = mixture.merge(proposed, budgets[place], min_probs[place])
    return trees


def _propose_parts(mixtures: Sequence[MixtureSession], budgets: Sequence[int]) -> list[list[DraftTree]]:
    """Return the proposals of all parts of mixtures, with nodes of any probability."""
    parts = [part for mixture in mixtures for part in mixture.sessions]
    part_budgets = [
        budget for mixture, budget in zip(mixtures, budgets, strict=True) for _ in mixture.sessions
    ]
    try:
        proposed = iter(propose_many(parts, part_budgets, [0.0] * len(parts)))
    except Exception:  # noqa: BLE001 (of one source; only that is disabled)
        return [
            mixture.propose_each(budget) if budget else [DraftTree.empty()] * len(mixture.sessions)
            for mixture, budget in zip(mixtures, budgets, strict=True)
        ]
    return [[next(proposed) for _ in mixture.sessions] for mixture in mixtures]


def _source_of(session: Session) -> Hashable:
    if type(session) is not ContextSession:
        return id(session)
    return session.drafter.source, session.needs_hidden


def _propose_together(sessions: Sequence[Session], budget: int, min_prob: float) -> list[DraftTree]:
    if len(sessions) == 1:
        return [sessions[0].propose(budget, min_prob)]
    contexts = [session for session in sessions if isinstance(session, ContextSession)]
    return propose_batch(contexts[0].drafter, contexts, budget, min_prob)
