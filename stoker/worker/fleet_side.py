"""What a worker reports to gateways: its description, its load, and its tokenizer."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from stoker.base.address import join_address
from stoker.base.errors import NotFound
from stoker.base.fleet_key import FleetKey
from stoker.proto.messages import TokenizerFiles, WorkerInfo, WorkerRegistration, WorkerReport
from stoker.text.folder import text_files
from stoker.worker.context import CONTEXT, WorkerContext


def worker_info(context: WorkerContext, host: str) -> WorkerInfo:
    """Describe this worker. `host` is the name under which the receiver reaches this machine."""
    info, identity = context.service.info, context.identity

    def address(port: int | None) -> str | None:
        return None if port is None else f"tcp://{join_address(host, port)}"

    return WorkerInfo(
        worker_id=identity.worker_id,
        role=identity.role,
        models=list(context.config.served_names),
        fingerprint=info.model_fingerprint,
        block_tokens=info.block_tokens,
        num_blocks=info.num_blocks,
        max_model_tokens=info.max_model_tokens,
        events=address(identity.events_port),
        replay=address(identity.replay_port),
        tokenizer=context.text.digest,
        engine_id=info.engine_id or None,
        kv_address=info.kv_address,
        stores=info.stores,
        volatile_lines=list(context.config.volatile_lines),
        secret_id=None if identity.secret is None else FleetKey(identity.secret).key_id,
    )


def registration(context: WorkerContext, url: str, host: str) -> WorkerRegistration:
    return WorkerRegistration(
        url=url, moving=context.state.moving, **msgspec.structs.asdict(worker_info(context, host))
    )


def worker_report(context: WorkerContext, number: int) -> WorkerReport:
    """Return the load report. While the engine restarts, nothing waits or runs, and no block is free."""
    service, stats = context.service, context.service.stats
    return WorkerReport(
        worker_id=context.identity.worker_id,
        number=number,
        role=context.identity.role,
        role_assigned=context.identity.role_assigned,
        ready=service.ready,
        draining=context.state.draining,
        moving=context.state.moving,
        waiting_sequences=stats.waiting_sequences if stats else 0,
        waiting_tokens=stats.waiting_tokens if stats else 0,
        running_sequences=stats.running_sequences if stats else 0,
        free_blocks=stats.free_blocks if stats else 0,
        num_blocks=service.info.num_blocks,
        block_tokens=service.info.block_tokens,
        prefill_tokens_per_s=stats.prefill_tokens_per_s if stats else None,
        step_s=stats.decode_step_s if stats else None,
    )


async def show_worker(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    # The caller reached this machine under this name, so it reaches the other ports under it, too.
    return _json(worker_info(context, request.url.host or "127.0.0.1"))


async def show_load(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return _json(worker_report(context, 0))


async def show_tokenizer(request: web.Request) -> web.Response:
    folder = request.app[CONTEXT].text.folder
    if folder is None:
        raise NotFound("The tokenizer of this worker was not loaded from files.")
    return _json(TokenizerFiles(files=await asyncio.to_thread(text_files, folder)))


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
