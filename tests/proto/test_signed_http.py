"""Signed requests: only the fleet's members can sign, each signature works once, and the server proves itself too."""

from __future__ import annotations

import random

import pytest

from stoker.base.errors import ConfigError
from stoker.base.fleet_key import EVENTS_CLIENT, EVENTS_SERVER, KV_PEERS, PROOFS, REQUESTS, FleetKey, read_fleet_secret
from stoker.proto.signed_http import RequestSigner, RequestVerifier, SignedHead

KEY = FleetKey("a secret of this fleet")
POST, PATH, BODY = b"POST", b"/v1/chat/completions", b'{"messages": []}'


def pair(key: FleetKey = KEY) -> tuple[RequestSigner, RequestVerifier]:
    signer, verifier = RequestSigner(key), RequestVerifier(KEY)
    assert signer.learn(verifier.challenge.encode())
    return signer, verifier


def check(verifier: RequestVerifier, sent: bytes, body: bytes = BODY) -> SignedHead | None:
    head = verifier.check(sent, POST, PATH)
    return head if head is not None and head.has_body(body) else None


def test_a_signature_works_once() -> None:
    signer, verifier = pair()
    sent = signer.sign(POST, PATH, BODY)
    head = check(verifier, sent)
    assert head is not None
    assert signer.is_proven(head.proof)
    assert check(verifier, sent) is None


def test_everything_that_is_sent_is_signed() -> None:
    signer, verifier = pair()
    assert verifier.check(signer.sign(POST, PATH, BODY), b"GET", PATH) is None
    assert verifier.check(signer.sign(POST, PATH, BODY), POST, PATH + b"?x") is None
    assert check(verifier, signer.sign(POST, PATH, BODY), BODY + b" ") is None
    sent = signer.sign(POST, PATH, BODY)
    for at in range(len(sent)):
        changed = sent[:at] + (b"0" if sent[at : at + 1] != b"0" else b"1") + sent[at + 1 :]
        assert check(verifier, changed) is None, at
    assert check(verifier, sent) is not None  # refused attempts do not use up the counter


@pytest.mark.parametrize("sent", [None, b"", b"a.b.c.d.e", b"\xff", b"0" * 200, "ö".encode()])
def test_a_header_in_a_wrong_format_is_refused(sent: bytes | None) -> None:
    assert RequestVerifier(KEY).check(sent, POST, PATH) is None


def test_another_secret_neither_signs_nor_proves() -> None:
    signer, verifier = pair(FleetKey("another secret"))
    assert check(verifier, signer.sign(POST, PATH, BODY)) is None
    ours, theirs = pair(), RequestVerifier(FleetKey("another secret"))
    ours[0].learn(theirs.challenge.encode())
    ours[0].sign(POST, PATH, BODY)
    assert not ours[0].is_proven(b"0" * 32)
    assert not ours[0].is_proven(None)


def test_a_proof_belongs_to_one_request() -> None:
    signer, verifier = pair()
    head = check(verifier, signer.sign(POST, PATH, BODY))
    assert head is not None
    signer.sign(POST, PATH, BODY)
    assert not signer.is_proven(head.proof)


def test_a_restarted_server_has_another_challenge() -> None:
    signer, _ = pair()
    again = RequestVerifier(KEY)
    assert check(again, signer.sign(POST, PATH, BODY)) is None
    assert signer.learn(again.challenge.encode())
    assert check(again, signer.sign(POST, PATH, BODY)) is not None


@pytest.mark.parametrize("challenge", [None, b"", b"x" * 32, b"0" * 31, b"0" * 32 + b"\n"])
def test_only_a_challenge_is_learned(challenge: bytes | None) -> None:
    assert not RequestSigner(KEY).learn(challenge)


def test_requests_may_overtake_each_other() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    signer, verifier = pair()
    sent = [signer.sign(POST, PATH, BODY) for _ in range(3000)]
    random.Random(seed).shuffle(sent)
    assert all(check(verifier, one) is not None for one in sent)
    assert not any(check(verifier, one) is not None for one in sent)


def test_a_counter_that_is_too_old_is_refused() -> None:
    signer, verifier = pair()
    first, *others = [signer.sign(POST, PATH, BODY) for _ in range(4097)]
    assert check(verifier, others[-1]) is not None
    assert check(verifier, first) is None
    assert check(verifier, others[0]) is not None


def test_too_many_clients_change_the_challenge_and_allow_no_replay() -> None:
    verifier = RequestVerifier(KEY, max_clients=3)
    before, sent = verifier.challenge, []
    for _ in range(4):
        signer = RequestSigner(KEY)
        signer.learn(verifier.challenge.encode())
        sent.append(signer.sign(POST, PATH, BODY))
        last = check(verifier, sent[-1])
    assert last is None
    assert verifier.challenge != before
    assert not any(check(verifier, one) for one in sent)
    signer.learn(verifier.challenge.encode())
    assert check(verifier, signer.sign(POST, PATH, BODY)) is not None


def test_each_purpose_has_a_key_of_its_own() -> None:
    purposes = (REQUESTS, PROOFS, EVENTS_SERVER, EVENTS_CLIENT, KV_PEERS)
    assert len({KEY.derive(purpose) for purpose in purposes}) == len(purposes)
    assert KEY.derive(PROOFS) == FleetKey("a secret of this fleet").derive(PROOFS)
    assert KEY.derive(PROOFS) != FleetKey("a secret of this fleeT").derive(PROOFS)


@pytest.mark.parametrize(
    ("text", "reason"), [("short", "5 characters"), ("", "holds no secret"), ("é" * 20, "cannot be read")]
)
def test_a_bad_secret_is_refused(tmp_path: object, text: str, reason: str) -> None:
    path = tmp_path / "secret"  # type: ignore[operator]
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_fleet_secret(path, "--secret-file")
