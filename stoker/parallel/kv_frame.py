"""What the ranks do with KV, as fields of a frame: loads of a plan, and updates between two plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LocalLoad, OfferedBlock
from stoker.parallel.frame_fields import FrameReader, FrameWriter


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """The new state of a lease in one KV set: the first `num_same` blocks are those that the ranks know, and these follow."""

    lease_id: str
    kv_set: int
    num_same: int
    keys: list[BlockKey]
    blocks: list[BlockId]
    names: list[BlockName]  # of the leading full blocks
    num_ready: int
    complete: bool


@dataclass(frozen=True, slots=True)
class KvHint:
    """A prefetch hint: KV that a later request will need."""

    token_ids: list[int]
    salt: str
    ticket: KvTicket | None


@dataclass(frozen=True, slots=True)
class KvUpdate:
    """What rank 0 has decided about the KV of all ranks. `after` is the number of the last step that rank 0 has waited for: a
    rank may still run it, and the blocks of the update are final only after it."""

    after: int = 0
    offers: list[OfferedBlock] = field(default_factory=list)
    leases: list[LeaseChange] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)  # ids of leases
    hints: list[KvHint] = field(default_factory=list)


def put_update(writer: FrameWriter, update: KvUpdate) -> None:
    writer.put(update.after, len(update.offers))
    for offer in update.offers:
        writer.put(offer.block, offer.kv_set)
        _put_name(writer, offer.name)
    writer.put(len(update.leases))
    for lease in update.leases:
        writer.put_text(lease.lease_id)
        writer.put(lease.kv_set, lease.num_same, lease.num_ready, lease.complete)
        writer.put_keys(lease.keys)
        writer.put_list(lease.blocks)
        writer.put(len(lease.names))
        for name in lease.names:
            _put_name(writer, name)
    writer.put(len(update.closing))
    for lease_id in update.closing:
        writer.put_text(lease_id)
    writer.put(len(update.hints))
    for hint in update.hints:
        writer.put_list(hint.token_ids)
        writer.put_text(hint.salt)
        _put_ticket(writer, hint.ticket)


def take_update(reader: FrameReader) -> KvUpdate:
    update = KvUpdate(reader.one())
    for _ in range(reader.one()):
        block, kv_set = reader.take(2)
        update.offers.append(OfferedBlock(_take_name(reader), BlockId(block), kv_set))
    for _ in range(reader.one()):
        lease_id = reader.text()
        kv_set, num_same, num_ready, complete = reader.take(4)
        keys, blocks = reader.keys(), _take_blocks(reader)
        names = [_take_name(reader) for _ in range(reader.one())]
        update.leases.append(LeaseChange(lease_id, kv_set, num_same, keys, blocks, names, num_ready, bool(complete)))
    for _ in range(reader.one()):
        update.closing.append(reader.text())
    for _ in range(reader.one()):
        update.hints.append(KvHint(reader.take_list(), reader.text(), _take_ticket(reader)))
    return update


def put_loads(writer: FrameWriter, loads: list[KvLoad]) -> None:
    writer.put(len(loads))
    for load in loads:
        writer.put(load.load_id, load.first, load.num_stored)
        writer.put_keys(load.keys)
        writer.put_list(load.blocks)
        _put_ticket(writer, load.ticket)
        writer.put(len(load.local))
        for part in load.local:
            writer.put(part.kv_set, part.first)
            writer.put_keys(part.keys)
            writer.put_list(part.blocks)


def take_loads(reader: FrameReader) -> list[KvLoad]:
    loads = []
    for _ in range(reader.one()):
        load_id, first, num_stored = reader.take(3)
        keys, blocks, ticket = reader.keys(), _take_blocks(reader), _take_ticket(reader)
        local = []
        for _ in range(reader.one()):
            kv_set, place = reader.take(2)
            local.append(LocalLoad(kv_set, place, reader.keys(), _take_blocks(reader)))
        loads.append(KvLoad(load_id, first, keys, blocks, num_stored, ticket, local))
    return loads


def _take_blocks(reader: FrameReader) -> list[BlockId]:
    return [BlockId(block) for block in reader.take_list()]


def _put_name(writer: FrameWriter, name: BlockName) -> None:
    writer.put_bytes(name.key)
    writer.put_bytes(name.parent)
    writer.put_list(name.token_ids)
    writer.put(name.salt is not None)
    writer.put_text(name.salt or "")


def _take_name(reader: FrameReader) -> BlockName:
    key, parent, token_ids = BlockKey(reader.data()), BlockKey(reader.data()), tuple(reader.take_list())
    has_salt, salt = reader.one(), reader.text()
    return BlockName(key, parent, token_ids, salt if has_salt else None)


def _put_ticket(writer: FrameWriter, ticket: KvTicket | None) -> None:
    writer.put(ticket is not None)
    if ticket is not None:
        for text in (ticket.engine_id, ticket.address, ticket.lease_id):
            writer.put_text(text)
        writer.put(ticket.num_tokens)
        writer.floats.append(ticket.lease_s)


def _take_ticket(reader: FrameReader) -> KvTicket | None:
    if not reader.one():
        return None
    engine_id, address, lease_id = reader.text(), reader.text(), reader.text()
    return KvTicket(engine_id, address, lease_id, reader.one(), *reader.floats(1))
