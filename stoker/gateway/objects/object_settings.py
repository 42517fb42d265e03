"""The settings of what tenants keep in the store: stored responses, files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class ResponsesSettings:
    """Stored responses of the Responses API. They need a store."""

    store_default: bool = setting(True, "Whether a response is stored if its request does not say so, as OpenAI does.")
    retention_s: float = setting(
        30 * 86_400.0,
        "How long a response is kept. Continuing a conversation keeps all of its responses.",
        unit="s",
        gt=0,
    )
    max_mib: float = setting(16.0, "Maximum size of one stored response with its input.", unit="MiB", gt=0)
    max_tenant_mib: float = setting(
        1024.0, "Maximum size of a tenant's responses, compressed. The oldest make room.", unit="MiB", gt=0
    )
    max_turns: int = setting(1000, "Maximum turns of a conversation that previous_response_id continues.", ge=1)
    max_background: int = setting(64, "Maximum background responses of a tenant that have not ended.", ge=1)
    background_s: float = setting(
        3600.0, "Maximum time that a background response waits for a worker. It fails then.", unit="s", gt=0
    )
    lease_s: float = setting(
        15.0,
        "A gateway that does not renew its lease on a background response or a batch for this long counts as dead.",
        unit="s",
        ge=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "responses")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The Files and Batch API. They need a store."""

    max_lines: int = setting(50_000, "Maximum requests in one batch.", ge=1)
    max_batches: int = setting(32, "Maximum batches of an API key that have not ended.", ge=1)
    max_tenant_mib: float = setting(4096.0, "Maximum size of a tenant's files, compressed.", unit="MiB", gt=0)
    retention_s: float = setting(
        30 * 86_400.0,
        "How long a file or an ended batch is kept, unless a file's expires_after says less.",
        unit="s",
        gt=0,
    )
    running: int = setting(64, "Maximum lines of all batches that a gateway works on at a time.", ge=1)
    insist_after: int = setting(
        10,
        "A line that interactive requests have preempted this often is not preempted again. Only one line at a time insists.",
        ge=1,
    )
    poll_s: float = setting(1.0, "How often a gateway looks for batches to work on.", unit="s", gt=0)

    def __post_init__(self) -> None:
        check_settings(self, "batch")
