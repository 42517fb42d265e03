"""`kv_transfer_params`: where the KV of an answer can be pulled. In vLLM's shape, so that its proxies pass it on."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stoker.proto.openai.fields import CountOrZero, Ignored

LeaseName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,144}\Z")]


class KvTransfer(msgspec.Struct, kw_only=True):
    """Where one choice's KV can be pulled: a prefill worker's answer, which goes into decode's request as it is. The names are
    vLLM's, whose proxies pass it on; `transfer_mode` tells ours from other engines'."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_mode: Literal["stoker"] = "stoker"
    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    remote_host: Annotated[str, Meta(min_length=1, max_length=256)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_request_id: LeaseName
    remote_num_tokens: CountOrZero = 0  # 0: not known yet, to whoever asks ahead
    remote_block_ids: Ignored = []  # ours have keys; proxies look for the field
    lease_s: Annotated[float, Meta(gt=0, le=1e6)] = 30.0


class KvTransfers(msgspec.Struct, kw_only=True):
    """The same for an answer of several choices, in their order; null for one that has ended."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_mode: Literal["stoker"] = "stoker"
    choices: list[KvTransfer | None]


KvTransferParams = KvTransfer | KvTransfers
