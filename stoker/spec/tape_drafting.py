"""TapeDrafting: gives each decoding sequence a tape, and decides how much of it a step verifies. Pure.

A sequence follows its tape until a sampled token differs from the guess. Then the drafters are asked again, the one that
was right most often first. In a large batch, the drafters are called less often for a sequence for which none finds anything,
where the host's time for all sequences would delay the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from stoker.sched.draft_tape import MAX_DRAFTS, MODEL_GUESSES, TAPE_TOKENS, DraftTape
from stoker.sched.drafting import TapeDrafter
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts
from stoker.spec.acceptance import Acceptance, SequenceRates
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.draft_length import DraftChance, draft_lengths, guess_count, least_chance

GRAMMAR = "grammar"  # the source of what the runner suggests
_FIRST_RATES = {GRAMMAR: 0.9}  # forced text is a wrong guess only where the model writes it in other tokens
_FEW_GUESSES = 4  # with fewer guesses left on the tape, the drafters are asked for more
_PROBE_TOKENS = 64  # a draft model that does not pay is tried again after this many tokens of a sequence
_PROBE_STEPS = 16  # only one step in this many makes guesses for such trials
_IDLE_STEPS = 64  # one step in this many makes no guesses, so that their cost can be told from that of the step
_MAX_PAUSE_TOKENS = 32  # the longest pause of a sequence for which no drafter finds anything


class _Follower:
    """How far one sequence has followed its tape."""

    __slots__ = ("guesses", "launched", "num_checked", "num_failures", "probe_at", "rates", "resume_at", "suggestion")

    def __init__(self, rates: SequenceRates, guesses: int) -> None:
        self.rates = rates
        self.guesses = guesses  # of a draft model, after the last step of the sequence
        self.num_checked = 0  # tokens of the sequence that were compared with the tape
        self.num_failures = 0  # tapes in a row whose first guess was wrong, or that did not exist
        self.resume_at = 0  # length of the sequence at which drafters are asked again
        self.probe_at = _PROBE_TOKENS  # length of the sequence at which a draft model that does not pay is tried again
        self.suggestion: DraftTape | None = None
        self.launched: deque[str] = deque()  # sources of the drafts in flight

    def check(self, seq: Sequence) -> None:
        """Compare the new tokens with the tape, and drop the tape at the first wrong guess."""
        tape = seq.tape
        if tape is None:
            return
        for position in range(max(self.num_checked, tape.start), len(seq.token_ids)):
            if position - tape.start >= len(tape.token_ids):
                seq.tape = None
                break
            guess = tape.token_ids[position - tape.start]
            is_right = guess == seq.token_ids[position]
            self.rates.record(tape.source, is_right)
            if is_right:
                self.num_failures = 0
            elif guess >= 0:
                seq.tape = None
                self.num_failures += position == tape.start
                break
        self.num_checked = len(seq.token_ids)


class TapeDrafting:
    """Drafts from tapes. The sources are `drafters`, by name, and what the runner suggests.

    `model` is the name of a draft model that guesses on the device, for sequences without a tape.
    """

    def __init__(self, drafters: Mapping[str, TapeDrafter], counts: DraftCounts, model: str | None = None) -> None:
        self.uses_costs = True
        self._drafters = drafters
        self._model = model
        self._counts = counts
        self._acceptance = Acceptance(_FIRST_RATES)
        self._followers: dict[Sequence, _Follower] = {}
        self._num_plans = 0
        self.num_guesses = 0 if model is None else MODEL_GUESSES

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        if budget <= 0:
            return {}
        last_guesses, least = self.num_guesses, least_chance(costs, len(seqs))
        max_pause = min(_MAX_PAUSE_TOKENS, len(seqs) // 4)
        probes: list[Sequence] = []
        is_probed = False
        candidates: list[Sequence] = []
        chances: list[DraftChance] = []
        guessing: list[float] = []  # rates of the sequences that would verify guesses of the draft model
        for seq in seqs:
            follower = self._followers.get(seq)
            if follower is None:
                follower = self._followers[seq] = _Follower(SequenceRates(self._acceptance), last_guesses)
            follower.check(seq)
            tape = self._tape(seq, follower, max_pause)
            source, available = self._source(seq, tape, follower)
            rate = follower.rates.value(source) if source else 0.0
            if self._model is not None and (source == self._model or available <= MAX_DRAFTS):
                guessing.append(follower.rates.value(self._model))  # a tape may end with this step
            if available > 0 and rate >= least:
                candidates.append(seq)
                chances.append(DraftChance(rate, available))
            elif source == self._model and len(seq.token_ids) >= follower.probe_at:
                # The host never sees guesses that are not verified, so that their rate would never change.
                is_probed = True
                if available > 0:
                    follower.probe_at = len(seq.token_ids) + _PROBE_TOKENS
                    probes.append(seq)
        if self._model is not None:
            self._choose_guesses(seqs, guessing, is_probed, costs)
        if not candidates and not probes:
            return {}
        lengths = draft_lengths(chances, len(seqs), budget, costs)
        planned = {seq: length for seq, length in zip(candidates, lengths, strict=True) if length}
        planned |= dict.fromkeys(probes[: max(0, budget - sum(planned.values()))], 1)
        return planned

    def _choose_guesses(self, seqs: list[Sequence], rates: list[float], is_probed: bool, costs: StepCosts) -> None:
        """Choose how many guesses the draft model makes after this step. Sequences that start now count like the others."""
        self._num_plans += 1
        if not seqs:
            rates = [self._acceptance.value(self._model or "")]
        number = guess_count(rates, max(1, len(seqs)), costs)
        if not number and is_probed and self._num_plans % _PROBE_STEPS == 0:
            number = 1
        if _is_idle(self._num_plans) and costs != StepCosts():
            number = 0
        self.num_guesses = number
        for seq in seqs:
            self._followers[seq].guesses = number

    def launched(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            follower = self._followers[seq]
            follower.launched.append(self._source(seq, seq.tape, follower)[0])

    def _source(self, seq: Sequence, tape: DraftTape | None, follower: _Follower) -> tuple[str, int]:
        """Return where the sequence's next drafts come from, and how many there are."""
        if tape is not None:
            available = tape.start + len(tape.token_ids) - len(seq.token_ids) - seq.num_pending
            if available > 0 or self._model is None:
                return tape.source, available
        return ("", 0) if self._model is None else (self._model, follower.guesses)

    def committed(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        follower = self._followers.get(seq)
        if follower is not None and follower.launched:
            source, num_right = follower.launched.popleft(), len(token_ids) - 1
            self._counts.record(source, num_drafts, num_right)
            if source == self._model:  # the host never sees its guesses, so that `check` cannot compare them
                for number in range(min(num_right + 1, num_drafts)):
                    follower.rates.record(source, number < num_right)

    def dropped(self, seq: Sequence) -> None:
        follower = self._followers.get(seq)
        if follower is not None and follower.launched:
            follower.launched.popleft()

    def suggested(self, seq: Sequence, token_ids: list[int]) -> None:
        follower = self._followers.get(seq)
        if follower is not None and token_ids:
            follower.suggestion = DraftTape(len(seq.token_ids), token_ids[:TAPE_TOKENS], GRAMMAR)

    def ended(self, seq: Sequence) -> None:
        self._followers.pop(seq, None)
        for drafter in self._drafters.values():
            drafter.ended(seq)

    def _tape(self, seq: Sequence, follower: _Follower, max_pause: int) -> DraftTape | None:
        """Return the sequence's tape, a new one if the last one is wrong or nearly used up."""
        length = len(seq.token_ids)
        suggestion, follower.suggestion = follower.suggestion, None
        if suggestion is not None and suggestion.start == length and not _agree(seq.tape, suggestion):
            seq.tape = suggestion
        tape = seq.tape
        if tape is not None and tape.start + len(tape.token_ids) - length - seq.num_pending >= _FEW_GUESSES:
            return tape
        if length < follower.resume_at:
            return tape
        guesses, source = self._propose(seq, follower)
        if guesses and (tape is None or tape.start + len(tape.token_ids) < length + len(guesses)):
            seq.tape = DraftTape(length, guesses, source)
        elif not guesses and tape is None:
            follower.num_failures += 1
        if follower.num_failures and max_pause:
            follower.resume_at = length + min(1 << min(follower.num_failures, 5), max_pause)
        return seq.tape

    def _propose(self, seq: Sequence, follower: _Follower) -> tuple[list[int], str]:
        """Return the guesses of the first drafter that has any, the one that was right most often first."""
        names = list(self._drafters)
        if len(names) > 1:
            names.sort(key=lambda name: -follower.rates.value(name))  # stable: equal ones stay in their order
        for name in names:
            if guesses := self._drafters[name].propose(seq, TAPE_TOKENS):
                return guesses, name
        return [], ""


def _is_idle(number: int) -> bool:
    """Return True for the steps that make no guesses: a few of the first ones, then one in _IDLE_STEPS."""
    return number % _IDLE_STEPS == 0 or (number < _IDLE_STEPS and number & (number - 1) == 0)


def _agree(tape: DraftTape | None, other: DraftTape) -> bool:
    """Return True if a tape has the same guesses as `other` wherever that has any."""
    if tape is None or tape.start > other.start:
        return False
    first = other.start - tape.start
    return tape.token_ids[first : first + len(other.token_ids)] == other.token_ids
