"""Departures: running and waiting sequences that another worker takes over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.kv.blocks.transfer import KvTicket
from stoker.sched.leases import Leases
from stoker.sched.request import Finish, TokenChunks
from stoker.sched.residency import Residency
from stoker.sched.sequence import Sequence, SequenceState
from stoker.sched.step_outcomes import LaunchedPlan


class Departures:
    """The sequences that leave as soon as the steps that were launched for them are committed."""

    def __init__(self, residency: Residency, leases: Leases) -> None:
        self._residency = residency
        self._leases = leases
        self._leaving: list[Sequence] = []

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    def start(self, seq: Sequence, lease_id: str) -> None:
        """Let another worker continue a sequence, whose KV is then held under `lease_id`.

        Does nothing for a sequence that leaves already, or for a running one with a lease, which hands itself off after its
        prompt.
        """
        if seq.leaves_under is not None:
            return
        if seq.request.lease_id is not None and seq.state is not SequenceState.WAITING:
            return
        seq.leaves_under = lease_id
        self._leaving.append(seq)

    def end(self, launched: Iterable[LaunchedPlan]) -> TokenChunks:
        """End the leaving sequences that no launched plan has. Return their last chunks."""
        chunks = TokenChunks()
        if self._leaving:
            in_flight = {id(seq) for plan in launched for seq in plan.seqs}
            leaving = [
                seq for seq in self._leaving if seq.state is not SequenceState.DONE
            ]  # others ended in a different way
            self._leaving = [seq for seq in leaving if id(seq) in in_flight]
            for seq in leaving:
                if id(seq) not in in_flight:
                    ticket = self._ticket_for(seq)
                    self._residency.remove(seq)
                    chunks.add(seq.request.request_id, [], seq.usage, None, Finish("handoff"), ticket)
        return chunks

    def _ticket_for(self, seq: Sequence) -> KvTicket | None:
        """Return a ticket for the KV that was computed here. Without any, return the ticket that the sequence came with."""
        assert seq.leaves_under is not None
        if seq.state is SequenceState.RUNNING and seq.num_computed and self._leases.can_hold:
            return self._leases.take_over(seq.leaves_under, seq, min(seq.num_computed, len(seq.token_ids) - 1))
        return seq.request.ticket if seq.cached_tokens is None else None
